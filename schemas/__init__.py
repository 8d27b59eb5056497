"""Every shape that crosses a process: engine wire formats, normalized events, profiles, topics, errors."""

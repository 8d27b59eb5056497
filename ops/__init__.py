"""What an operator meets: settings, logs, metrics, the command line, the demo and the embedded services."""

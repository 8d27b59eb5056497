"""Laws, searched by hypothesis."""

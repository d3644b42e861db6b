"""Every value that crosses a file or process border. Knows no room above it and does no I/O."""

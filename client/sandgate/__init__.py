"""The command line and the native client of sandgate."""

"""The step loop, and the commands and reports that it exchanges with the server's process."""

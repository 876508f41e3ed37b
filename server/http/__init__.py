"""The way between the socket and a route: parsing, access, limits, and server-sent events. It
knows no API: neither fields nor the words of an answer."""

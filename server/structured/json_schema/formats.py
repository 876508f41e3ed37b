"""The `format` keyword: the formats that llguidance enforces, and patterns that make them exact."""

# The formats of llguidance.
_FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
}
# Formats that contain one of llguidance's, which is enforced in their place.
_NARROWER_FORMATS = {
    "idn-email": "email",
    "idn-hostname": "hostname",
    "iri": "uri",
    "uri-reference": "uri",
    "iri-reference": "uri",
}
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_REAL_DATE = f"^([0-9]{{4}}-(0[013-9]|1|02-([01]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_AFTER_YEAR_0 = "^[0-9]{0,3}[1-9]"
_SECOND_BELOW_60 = "^[^:]*:[0-9]{2}:[0-5]"
# Patterns that must hold too: llguidance accepts February 29 of any year, and RFC 3339 allows
# year 0 and second 60, which few parsers accept.
_PATTERNS = {
    "date": (_REAL_DATE, _AFTER_YEAR_0),
    "date-time": (_REAL_DATE, _AFTER_YEAR_0, _SECOND_BELOW_60),
    "time": (_SECOND_BELOW_60,),
    "json-pointer": ("^(/([^~/]|~[01])*)*$",),
}


def enforced_format(name: str) -> tuple[str | None, tuple[str, ...]]:
    """The format of llguidance that enforces this one, if any, and the patterns to add.

    TypeError if the name is not hashable.
    """
    name = _NARROWER_FORMATS.get(name, name)
    return (name if name in _FORMATS else None), _PATTERNS.get(name, ())

"""Credentials in URLs, made unreadable before anything is printed or recorded."""

import re

_USER = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s'\"<>]*@")
# A link to a view of the MLflow UI has a key that is none: it names the view.
_QUERY = re.compile(
    r"([?&](?!viewStateShareKey=)[\w.-]*(?:token|passw|pwd|secret|key|signature|sig|credential|auth)[\w.-]*=)[^&\s'\"<>]+",
    re.IGNORECASE,
)


def masked(text: str) -> str:
    """`s3://user:word@host/a?token=x` as `s3://***@host/a?token=***`; text without credentials as it is."""
    return _QUERY.sub(r"\1***", _USER.sub(r"\1***@", text))

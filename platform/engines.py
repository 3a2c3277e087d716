"""Which engines there are."""

from dbo.platform.cluster import Ray
from dbo.platform.local import Local

ENGINES: dict[str, type] = {"ray": Ray, "local": Local}

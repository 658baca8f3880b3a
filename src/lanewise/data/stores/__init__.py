"""Where data lives: a folder on a local disk, S3 (also Ceph through its gateway) or HDFS, all used in one way."""

from lanewise.data.stores.base import Store
from lanewise.data.stores.cache import Cache
from lanewise.data.stores.open import configure, open_store
from lanewise.data.stores.retry import StoreAway

__all__ = ["Cache", "Store", "StoreAway", "configure", "open_store"]

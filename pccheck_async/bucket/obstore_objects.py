# SPDX-License-Identifier: Apache-2.0
"""Objects through the library obstore: S3, GCS, Azure, a local folder, memory. Imported when a store is first opened.

Errors contain a remedy, and never the library's text, in which addresses with signatures may be.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import unquote, urlsplit

from pccheck_async.bucket.objects import INSTALL, Data, MissingObjectError, Objects, Patient, RefusedError
from pccheck_async.errors import NoCheckpointError, ReadError, WriteError

__all__ = ["Location", "ObstoreObjects", "is_location", "open_objects", "shown"]

Location: TypeAlias = Any
"""A URL (``s3://bucket/run``), or an obstore store object."""
_SCHEMES: Final = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "file")
_CLIENT_OPTIONS: Final = frozenset((
    "allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type", "default_headers",
    "http1_only", "http2_keep_alive_interval", "http2_keep_alive_timeout", "http2_keep_alive_while_idle", "http2_only",
    "pool_idle_timeout", "pool_max_idle_per_host", "proxy_url", "proxy_ca_certificate", "proxy_excludes",
    "randomize_addresses", "read_timeout", "root_certificate", "timeout", "user_agent",
))  # fmt: skip
_LIST_PAGE: Final = 1000
_STATUS = re.compile(r"status code: (\d{3})")
_REASON = re.compile(r"in [\d.]+\S{1,2} - ([^\n=?]{1,80})$", re.MULTILINE)
"""Finds the reason in the text of an error without an answer; excludes addresses, which may contain a signature."""
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_NO_CREDENTIALS: Final = (
    "no credentials were found: set those of the provider in the environment (AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY), give the machine a role, or "
    "options={...}"
)
_ADVICE: Final = {
    "NoSuchBucket": "there is no such bucket, or container: create it, or correct the URL",
    "ContainerNotFound": "there is no such container: create it, or correct the URL",
    "AccessDenied": (
        "permission denied: the credentials need to get, put, delete and list objects (s3:GetObject, s3:PutObject, "
        "s3:DeleteObject, and s3:ListBucket for the bucket itself)"
    ),
    "InvalidAccessKeyId": "the provider does not know the access key: check the credentials, and the endpoint",
    "SignatureDoesNotMatch": "the secret key is not that of the access key: check the credentials",
    "ExpiredToken": "the credentials have expired: renew them",
    "RequestTimeTooSkewed": "this machine's clock differs from the provider's by minutes: set it (NTP)",
    "InvalidBucketName": "the bucket's name is not allowed: correct the URL",
    "PermanentRedirect": "the bucket is in another region: give options={'region': ...}",
    "AuthorizationHeaderMalformed": "the bucket is in another region: give options={'region': ...}",
}


def is_location(path: object) -> bool:
    """Whether ``path`` is a location of objects: a URL, or an obstore store object."""
    if isinstance(path, (str, os.PathLike)):
        return "://" in os.fspath(path) if isinstance(os.fspath(path), str) else False
    return type(path).__module__.partition(".")[0] == "obstore"


def shown(location: Location) -> str:
    """Return the text of a location for messages, without a password or a query in its URL."""
    if not isinstance(location, (str, os.PathLike)):
        return f"a {type(location).__name__}"  # in its repr there may be a password
    parts = urlsplit(os.fspath(location))
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}".rstrip("/")


def open_objects(
    location: Location, options: Mapping[str, Any] | None = None, *, deadline: float = 60.0, writes: bool = False
) -> Objects:
    """Return the objects at a location; options that are not given are taken from the environment.

    Args:
        location: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///folder``, or an obstore store object, which
            has its own options.
        options: Options of obstore by name, for the provider and for the HTTP client.
        deadline: Seconds for each request, repetitions included.
        writes: Whether to make the folder of a ``file://`` URL if there is none.

    Raises:
        RefusedError: obstore or xxhash is not installed, or the URL or an option is wrong.
        NoCheckpointError: there is no such folder.
    """
    try:
        import obstore
        import xxhash  # noqa: F401 - for the names of objects
        from obstore.store import LocalStore, from_url
    except ImportError as error:
        raise RefusedError(f"object storage needs {error.name or 'obstore'}: {INSTALL}") from error
    check_process()
    options = dict(options or {})
    if not isinstance(location, (str, os.PathLike)):
        if options:
            raise RefusedError("options are for a URL; a store of obstore's has its own")
        return Patient(ObstoreObjects(location, shown(location)), deadline)
    url = os.fspath(location)
    scheme = urlsplit(url).scheme
    if scheme not in _SCHEMES:
        raise RefusedError(f"{shown(url)} is no place for checkpoints; known are s3://, gs://, az:// and file://")
    try:
        if scheme == "file":
            folder = Path(unquote(urlsplit(url).path))
            if not writes and not folder.is_dir():
                raise NoCheckpointError(f"{shown(url)} does not exist, so it holds no checkpoint; check the URL")
            store: Any = LocalStore(folder, mkdir=writes)
        else:
            client = {name: options.pop(name) for name in [*options] if name in _CLIENT_OPTIONS}
            client.setdefault("timeout", timedelta(hours=1))  # each request has a deadline of its own
            if os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):  # which client options would hide
                client.setdefault("allow_http", True)
            given = "AWS_CHECKSUM_ALGORITHM" in os.environ or any("checksum" in name.lower() for name in options)
            if scheme in ("s3", "s3a") and not given:  # the server compares it; the signature needs it, too
                options["checksum_algorithm"] = "SHA256"
            retry: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=deadline)}
            store = from_url(url, config=options or None, client_options=client or None, retry_config=retry)
    except obstore.exceptions.UnknownConfigurationKeyError as error:
        raise RefusedError(f"{shown(url)} cannot be opened: {str(error).partition(chr(10))[0]}") from None
    except (obstore.exceptions.BaseError, OSError, ValueError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else "the URL or an option is wrong"
        if "Account must be specified" in str(error):
            why = "Azure needs the account, in AZURE_STORAGE_ACCOUNT_NAME or options={'account_name': ...}"
        raise RefusedError(f"{shown(url)} cannot be opened: {why}") from None
    return Patient(ObstoreObjects(store, shown(url)), deadline)


_used_in: set[int] = set()
"""Ids of processes that have used obstore: this one, and those it was forked from after they did."""


def check_process() -> None:
    """Raise RefusedError in a fork of a process that used obstore: without its threads no request is ever answered."""
    if _used_in - {os.getpid()}:
        raise RefusedError(
            "this process was forked from one that uses object storage, whose threads it does not have: start it by "
            '"spawn" (multiprocessing.get_context("spawn"))'
        )


class ObstoreObjects(Objects):
    """The objects of one obstore store. Each call is one request; :meth:`list` sends one for each thousand names."""

    def __init__(self, store: Any, url: str) -> None:
        import obstore

        self.url = url
        self._store, self._obstore = store, obstore
        _used_in.add(os.getpid())

    def _error(self, error: Exception, kind: type[ReadError | WriteError]) -> Exception:
        """Convert an error of the library to the error to raise, which does not contain the library's text."""
        text = str(error)
        status, code = _STATUS.search(text), _CODE.search(text)
        name = code[1] if code else ""
        number = int(status[1]) if status else 0
        if "169.254.169.254" in text or "metadata.google" in text or "169.254.170.2" in text:
            return RefusedError(f"{self.url}: {_NO_CREDENTIALS}")
        if name in _ADVICE:
            return RefusedError(f"{self.url}: {_ADVICE[name]} ({name})")
        exceptions = self._obstore.exceptions
        refused = isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError))
        if refused or isinstance(error, PermissionError) or number in (401, 403):
            return RefusedError(f"{self.url}: {_ADVICE['AccessDenied']}")
        if isinstance(error, exceptions.NotSupportedError):
            return RefusedError(f"{self.url}: the store does not support a request that commits need")
        if "builder error" in text:
            return RefusedError(
                f"{self.url}: the endpoint is http://: give options={{'allow_http': True}}, or use https"
            )
        reason = _REASON.search(text)
        why = f"the store answered {number} {name}".rstrip() if number else (reason[1] if reason else "no answer")
        return kind(errno.EIO, why)

    async def put(self, key: str, data: Data) -> None:
        try:
            await self._obstore.put_async(self._store, key, data, use_multipart=False)
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise self._error(error, WriteError) from None

    async def create(self, key: str, data: bytes) -> bool:
        exceptions = self._obstore.exceptions
        try:
            await self._obstore.put_async(self._store, key, data, mode="create", use_multipart=False)
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileExistsError):
            return False
        except (exceptions.BaseError, OSError) as error:
            if re.search(r"status code: (409|412)", str(error)):
                return False
            raise self._error(error, WriteError) from None
        return True

    async def get(self, key: str, most: int) -> bytes | None:
        try:
            found = await self._obstore.get_async(self._store, key)
            if found.meta["size"] > most:
                raise MissingObjectError(f"{key} has {found.meta['size']} bytes, at most {most} are read")
            data = bytes(await found.bytes_async())
            if len(data) != found.meta["size"]:
                raise ReadError(errno.EIO, "a body was cut short")
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise self._error(error, ReadError) from None
            return None
        except ReadError:
            raise
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise self._error(error, ReadError) from None
        return data

    async def read(self, key: str, start: int, nbytes: int) -> memoryview:
        try:
            data = await self._obstore.get_range_async(self._store, key, start=start, length=nbytes)
        except FileNotFoundError:
            raise MissingObjectError(f"there is no object {key}") from None
        except (self._obstore.exceptions.BaseError, OSError) as error:
            if "status code: 416" in str(error) or "StartTooLarge" in str(error):
                raise MissingObjectError(f"{key} has less than {start} bytes") from None
            raise self._error(error, ReadError) from None
        if len(data) != nbytes:
            raise ReadError(errno.EIO, f"a body had {len(data)} of {nbytes} bytes")
        return memoryview(data)

    async def list(self, prefix: str, after: str = "") -> Sequence[tuple[str, int]]:
        try:
            stream = self._obstore.list(self._store, prefix.rstrip("/"), offset=after or None, chunk_size=_LIST_PAGE)
            found = [(each["path"], each["size"]) async for page in stream for each in page]
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise self._error(error, ReadError) from None
            return []
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise self._error(error, ReadError) from None
        return [(key, nbytes) for key, nbytes in found if key.startswith(prefix) and key > after]

    async def delete(self, keys: Collection[str]) -> None:
        for key in keys if type(self._store).__name__ == "LocalStore" else [[*keys]]:
            try:
                await self._obstore.delete_async(self._store, key)
            except FileNotFoundError:
                pass
            except (self._obstore.exceptions.BaseError, OSError) as error:
                raise self._error(error, WriteError) from None

    async def pause(self, attempt: int) -> None:
        return

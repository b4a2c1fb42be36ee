"""Whether a store's URL is one that can ever be reached: said at the start, not after every warm-up."""

from ..errors import ConfigError


def check_store_url(location: str | None) -> None:
    """Refuses a URL whose scheme no file system has; a directory is always taken.

    Raises:
        ConfigError: the scheme is unknown, or its file system is not installed.
    """
    if location is None or "://" not in location:
        return
    try:
        import fsspec  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise ConfigError(
            f"A store at a URL needs fsspec, got {location!r}; pip install 'servax[store]', or name a "
            "directory."
        ) from None
    for part in location.split("::"):
        scheme = part.partition("://")[0]
        try:
            fsspec.get_filesystem_class(scheme)
        except ValueError:
            raise ConfigError(
                f"A store is a directory or a URL of a scheme that fsspec knows, such as s3 or gs, got "
                f"{location!r}; correct {scheme!r} or name a directory."
            ) from None
        except ImportError as error:
            raise ConfigError(
                f"The file system of a store must be installed, got {location!r}: {error}; install it, or "
                "name a directory."
            ) from None

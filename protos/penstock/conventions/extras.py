"""How to install the optional dependencies of Penstock. Every part may import this module."""


def requires_extra(extra: str, missing: str) -> str:
    """Return the end of an error message: the extra that is required, the package or program
    `missing` that is not installed, and how to install the extra.

    The commands name a checkout or a wheel, because Penstock is on no package index.
    """
    return (
        f'requires the extra "{extra}" of penstock ({missing} is not installed):'
        f" pip install '.[{extra}]' in a checkout, or pip install 'WHEEL[{extra}]'"
    )

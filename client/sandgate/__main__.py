"""``python -m sandgate``: the same as the program ``sandgate``."""

from sandgate.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()

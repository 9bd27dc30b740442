"""python -m outbox: the same as the `outbox` command."""

from outbox.cli import main

if __name__ == "__main__":
    main()

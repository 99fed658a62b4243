"""`dynamiq-jax` and `python -m dynamiq_jax`: the command line, or what to install for it."""

NEEDED = ("optax", "rich", "typer")


def main() -> None:
    """Runs the command.

    Raises:
      SystemExit: when it is done, and where the extra `[cli]` is not installed.
    """
    try:
        from dynamiq_jax.commands.cli import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in NEEDED:
            raise
        raise SystemExit(f"dynamiq-jax needs {missing}: pip install 'dynamiq_jax[cli]'") from None
    app()


if __name__ == "__main__":
    main()

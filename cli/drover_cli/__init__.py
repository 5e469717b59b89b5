"""The command `drover`: one file per subcommand in `commands/`, each importing what it needs only when it runs."""

"""The report for those who pay: a ledger as Markdown, HTML, CSV or JSON; of a live collector or of a case."""

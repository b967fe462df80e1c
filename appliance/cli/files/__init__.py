"""``sms files``: one file an action, each with its parser and what runs it."""

"""Actions of ``sms node``."""

"""What verbs do: query, plan, apply, record. One folder per subject."""

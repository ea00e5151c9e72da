"""Values in error messages."""


def shown(value: object) -> str:
    """`repr(value)`, cut to 80 characters."""
    try:
        text = repr(value)
    except Exception:  # an integer of more than 4300 digits, or somebody's `__repr__`
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."

"""The table that the handlers of faulty.py write to, and the text that breaks its constraint."""

FORBIDDEN = "forbidden"
CREATE = f"""
    CREATE TABLE effects (
        id bigint GENERATED ALWAYS AS IDENTITY,
        what text NOT NULL CHECK (what <> '{FORBIDDEN}')
    )
"""

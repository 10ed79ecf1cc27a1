"""Which rights a role needs on our tables, and the GRANTs that it lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from processor.errors import SetupError

if TYPE_CHECKING:
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings

LIST = "processor_migrations"
NEEDED = {
    LIST: ("SELECT",),
    "inbox": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "ledger": ("SELECT", "INSERT", "UPDATE"),
    "unsent": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "parked_repeats": ("SELECT", "INSERT", "DELETE"),
    "replays": ("SELECT", "INSERT", "UPDATE"),
    "replay_ranges": ("SELECT", "INSERT", "UPDATE"),
    "log_ends": ("SELECT", "INSERT", "DELETE"),
    "forgotten": ("SELECT", "INSERT", "UPDATE"),
    "pruning": ("SELECT", "INSERT", "UPDATE"),
    "archived": ("SELECT", "INSERT", "UPDATE"),
    "partition_trouble": ("SELECT", "INSERT", "UPDATE", "DELETE"),
}

# Our tables lie beside the table of migrations: in the configured schema, else where search_path leads. To search_path
# and to_regclass, a schema that the role may not use does not exist: hence pg_class.
MISSING = """
    WITH home AS (
        SELECT n.oid, n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE c.relname = $4
          AND CASE WHEN $1::text IS NOT NULL THEN n.nspname = $1
                   ELSE pg_table_is_visible(c.oid) OR NOT has_schema_privilege(n.oid, 'USAGE') END
        ORDER BY pg_table_is_visible(c.oid) DESC LIMIT 1
    )
    SELECT format('GRANT USAGE ON SCHEMA %I TO %I', nspname, current_user) AS grant FROM home
    WHERE NOT has_schema_privilege(oid, 'USAGE')
    UNION ALL
    SELECT format('GRANT %s ON %I.%I TO %I', string_agg(privilege, ', ' ORDER BY privilege), nspname, relname,
                  current_user)
    FROM home
    JOIN pg_class c ON c.relnamespace = home.oid
    JOIN unnest($2::text[], $3::text[]) AS r(name, privilege) ON r.name = c.relname
    WHERE NOT has_table_privilege(c.oid, r.privilege)
    GROUP BY nspname, relname
    ORDER BY 1
"""

# For the role that applies migrations; the schema for our tables may still have to be created.
MISSING_TO_CREATE = """
    SELECT CASE
        WHEN $1::text IS NULL AND current_schema() IS NULL THEN
            format('GRANT USAGE, CREATE ON SCHEMA public TO %I', current_user)
        WHEN $1::text IS NOT NULL AND to_regnamespace(quote_ident($1)) IS NULL THEN
            CASE WHEN NOT has_database_privilege(current_database(), 'CREATE')
                 THEN format('GRANT CREATE ON DATABASE %I TO %I', current_database(), current_user) END
        WHEN NOT has_schema_privilege(coalesce($1, current_schema()), 'CREATE') THEN
            format('GRANT CREATE ON SCHEMA %I TO %I', coalesce($1, current_schema()), current_user)
    END
"""


async def missing(connection: Connection, schema: str | None) -> list[str]:
    """The GRANTs without which the processor cannot run; none where there are no tables yet."""
    wanted = [(table, privilege) for table, privileges in NEEDED.items() for privilege in privileges]
    rows = await connection.fetch(
        MISSING, schema, [name for name, _ in wanted], [privilege for _, privilege in wanted], LIST
    )
    return [row["grant"] for row in rows]


async def require(connection: Connection, settings: Settings) -> None:
    grants = await missing(connection, settings.database.schema)
    if grants:
        raise SetupError(f"{settings.source}: database.url: {lacks(grants)}")


async def require_to_create(connection: Connection, schema: str | None) -> None:
    grant = await connection.fetchval(MISSING_TO_CREATE, schema)
    if grant is not None:
        raise SetupError(f"the role may not create tables there: {grant}, or migrate as a role that may")


def lacks(grants: list[str]) -> str:
    return f"the role lacks rights: {'; '.join(grants)}"


def lacking(settings: Settings, error: BaseException) -> str:
    """The text for an error that Postgres raised because a right is missing."""
    text = " ".join(settings.redact(str(error)).split())
    return f"{settings.source}: database.url: {text}; `processor check {settings.source} --connect` names the GRANT"

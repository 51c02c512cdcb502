"""The hooks of the site rewrite Markdown that GitHub accepts but MkDocs does not."""

from __future__ import annotations

from site_hooks import adapt_github_markdown


def test_code_in_a_table_shows_pipes_without_a_backslash() -> None:
    table = '| a | b |\n|---|---|\n| `N\\|off` x\\|y | `{r=~"A\\|B"}` |'
    block = "```\n| `N\\|off` |\n```"

    text = adapt_github_markdown(f"{table}\n\n{block}")

    assert text == '| a | b |\n|---|---|\n| `N|off` x\\|y | `{r=~"A|B"}` |\n\n' + block

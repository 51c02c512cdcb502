"""Fewer Hypothesis examples in the default profile, for properties with costly examples."""

from hypothesis import settings


def fewer_examples(num_examples: int) -> settings:
    """Return settings with `num_examples` in the default profile, else the profile's number."""
    usual = settings.get_profile("default").max_examples
    num = settings().max_examples
    return settings(max_examples=num_examples if num == usual else num)

"""How many examples a property is tried with: a third of them.

--hypothesis-profile=long tries thirty times as many, for a run by hand.
"""

from hypothesis import settings

for profile, share in (("third", 33), ("long", 1000)):
    settings.register_profile(profile, max_examples=share, deadline=None)


def examples(count: int) -> settings:
    """Settings for so many examples, by the profile that is loaded before the tests are
    collected."""
    return settings(max_examples=max(count * settings().max_examples // 100, 1))

"""The colours of attention weights."""

# From white for 0 to navy for the largest weight, in equal steps of perceived colour (Oklab). The
# steps stay visible in grey print.
RAMP = (
    *("#ffffff", "#d4f0ff", "#abdeff", "#85cbfe", "#65b5f6", "#4e9de9"),
    *("#4185d4", "#3a6ebb", "#35589e", "#2f457f", "#283360", "#1f2442"),
)

__all__ = ["RAMP"]

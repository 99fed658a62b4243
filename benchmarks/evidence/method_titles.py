"""Names of methods on pages and in pictures, and their colours in pictures."""

TITLES = {
    "bf16-psum": "bf16 psum",
    "dynamiq": "**DynamiQ**",
    "dynamiq-dither": "**DynamiQ**, dither",
    "dynamiq-axis": "**DynamiQ**, `scale_axis`",
    "dynamiq-dither-axis": "**DynamiQ**, dither, `scale_axis`",
    "dynamiq-mse": "DynamiQ, squared error alone",
    "dynamiq-piecewise": "DynamiQ, piecewise levels",
    "dynamiq-memory": "DynamiQ, error feedback, groups of neighbours",
    "dynamiq-ef14": "DynamiQ, error feedback EF14",
    "dynamiq-ef21": "DynamiQ, error feedback EF21",
    "mxfp8": "MXFP8",
    "mxfp6": "MXFP6",
    "mxfp4": "MXFP4",
    "mxfp4-stochastic": "MXFP4, random rounding",
    "mxfp4-ef14": "MXFP4, error feedback EF14",
    "mxfp4-ef21": "MXFP4, error feedback EF21",
    "thc": "THC",
    "thc-saturating": "THC, saturating sums",
    "omnireduce": "OmniReduce",
    "topk-chunked": "Chunked top-k, no memory",
    "topk-chunked-memory": "Chunked top-k",
    "minmax": "MinMax, random rounding (QSDP's)",
    "flash": "MinMax, to nearest (Flash Communication's)",
    "qsgd": "Global-QSGD",
    "qsgd-exponential": "Global-QSGD, exponential",
    "marsit": "Marsit",
    "powersgd": "PowerSGD, rank 4, no memory",
    "powersgd-memory": "PowerSGD, rank 4",
    "arc-top-k": "ARC-Top-K, no memory",
    "arc-top-k-memory": "ARC-Top-K",
    "clt-k": "CLT-k, no memory",
    "clt-k-memory": "CLT-k",
    "sidco": "SIDCo, no memory",
    "sidco-memory": "SIDCo",
    "perm-k": "PermK",
    "liec": "LIEC, around MinMax with 4 bits",
}
"""Markdown, by names on the command line without bits."""

COLOURS = {
    "dynamiq": "#2171b5",
    "dynamiq:5": "#6baed6",
    "dynamiq:3.5": "#08306b",
    "dynamiq-dither": "#74c476",
    "dynamiq-dither:3.5": "#238b45",
    "dynamiq-dither-axis": "#9e9ac8",
    "dynamiq-dither-axis:3.5": "#54278f",
    "dynamiq-mse": "#e377c2",
    "dynamiq-memory": "#17becf",
    "dynamiq-piecewise": "#bcbd22",
    "mxfp8": "#d62728",
    "mxfp6": "#ff7f0e",
    "mxfp4": "#8c564b",
    "thc": "#fdae6b",
    "omnireduce": "#fb9a99",
    "bf16-psum": "black",
}
"""By names with bits, or without for all other numbers of bits."""


def title(method: str) -> str:
    """A method's name on the command line in plain words: "DynamiQ, 5 bits"."""
    name, _, bits = method.partition(":")
    words = TITLES.get(name, name).replace("*", "").replace("`scale_axis`", "scale axis")
    return f"{words}, {bits} bits" if bits else words


def colour(method: str) -> str:
    """A method's colour; grey if it has none."""
    return COLOURS.get(method) or COLOURS.get(method.partition(":")[0], "grey")

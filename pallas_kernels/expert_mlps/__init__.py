"""Each token's chosen MLPs of a mixture of experts."""

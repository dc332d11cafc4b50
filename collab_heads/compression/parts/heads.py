"""Remove heads, and refit W_O for those that stay.

Shapes: n the width of the concatenated heads, D width of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from collab_heads.calibration.input_moments import InputMoments
from collab_heads.compression.parts.part import LEVELS, Fit, Part, share, spread
from collab_heads.fitting.head_regression import HeadRegression, most_costly, regressed_weight
from collab_heads.model.apply_state import OutputWeights, prune_site
from collab_heads.model.open_layers import OpenSite
from collab_heads.sites.state import DIVIDED


class Heads(Part):
    """The number of heads; heads that share a key head are removed together."""

    name, field, column, heading = "heads", "heads", "heads", "heads"

    def capability(self, kind):
        return "prune"

    def whole(self, shape):
        """Return H."""
        return shape.geometry.num_heads

    def sizes(self, shape):
        """Return 0 and at most 2 * `LEVELS` other numbers of heads, multiples of the heads per key head."""
        group = shape.heads_per_key
        if group is None or self.name not in shape.parts:
            return []
        unit = -(-self.whole(shape) // group // (2 * LEVELS)) * group
        return list(range(0, self.whole(shape), unit))

    def resized(self, shape, choice, geometry):
        """Return the geometry with fewer heads; a projection that is divided among the heads becomes narrower, too.

        A site without heads has no projection of queries and keys.
        """
        heads, groups, query_key = choice.get(self.name), geometry.groups, geometry.query_key
        if heads is None:
            return geometry
        if not heads:
            return replace(geometry, num_heads=0, query_key=None, groups=None if groups is None else ())
        if groups is not None:
            groups = tuple(head // shape.heads_per_key for head in range(heads))
        if query_key is not None:
            dim = query_key.dim // geometry.num_heads * heads if query_key.kind in DIVIDED else query_key.dim
            query_key = replace(query_key, dim=dim, groups=groups)
        return replace(geometry, num_heads=heads, groups=groups, query_key=query_key)

    def allows(self, shape, choice, geometry):
        """Return False if a choice without heads has a width for them."""
        return choice.get(self.name) != 0 or len(choice.sizes) == 1

    def errors(self, site, shape, fitted, held):
        """Measure the error with W_O refitted for the heads that stay."""
        if not self.sizes(shape):
            return {}
        regression = head_regression(site, fitted.outputs[site.path])
        shown, costs, errors = held.outputs[site.path], regression.removal_costs(), {}
        whole = spread(regression.weight, shown)
        for count in self.sizes(shape):
            kept = most_costly(costs, count // shape.heads_per_key)
            refit, missing = regression.output(kept), regression.weight.clone()
            missing[:, regression.columns(kept)] -= refit.weight
            errors[count] = share(missing, refit.bias, shown, whole)
        return errors

    def fit(self, fitting):
        """Choose the heads that stay, and drop the calibration of the others."""
        site, seen, path = fitting.site, fitting.calibrations, fitting.site.path
        regression = head_regression(site, seen.outputs[path])
        kept_keys = most_costly(regression.removal_costs(), fitting.geometry.key_heads)
        kept = [head for head, key in enumerate(site.groups) if key in kept_keys]
        seen.outputs[path] = seen.outputs[path].part(regression.columns(kept_keys))
        if path in seen.query_key:
            calls = [call.of_heads(tuple(kept), site.num_heads) for call in seen.query_key[path].calls]
            seen.query_key[path] = replace(seen.query_key[path], calls=calls, kept={})
        output = regression.output(kept_keys).rounded(site.output)
        fitting.fits.append(KeptHeads([site.head_numbers[head] for head in kept], output))
        if kept:
            fitting.try_out()

    def resize(self, site, state, shape, geometry):
        """Keep the first heads."""
        return prune_site(site, state, site.head_numbers[: geometry.num_heads])

    def total(self, geometry):
        return geometry.num_heads

    def summary(self, sizes, wholes):
        """Return the number of heads that all sites keep, and that they have."""
        return f"{sum(sizes)} of {sum(wholes)}"


@dataclass(frozen=True)
class KeptHeads(Fit):
    """The fit of fewer heads: those that stay.

    Attributes:
        numbers: their original numbers, ascending.
        output: W_O, refitted for them.
    """

    numbers: Sequence[int]
    output: OutputWeights

    def put_into(self, site, state):
        return prune_site(site, state, self.numbers, self.output)


def head_regression(site: OpenSite, moments: InputMoments) -> HeadRegression:
    """Return the regression of the site's output on its heads' outputs; heads that share a key head count as one."""
    weight, _ = regressed_weight(site, folds_gates=False)
    has_bias = getattr(site.output, "bias", None) is not None
    return HeadRegression.of(weight, moments, site.site.num_key_heads, has_bias=has_bias)

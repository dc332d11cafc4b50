"""Narrow values, and the columns of W_O that read them."""

from dataclasses import dataclass, replace

from collab_heads.base.numerics import float64
from collab_heads.collaborative.plan import plan_values
from collab_heads.collaborative.replacement import fit_values
from collab_heads.compression.parts.part import QUICK, Fit, Part, narrower, share, spread
from collab_heads.compression.parts.query_key import fitted_projection
from collab_heads.fitting.quick_values import QuickHeads
from collab_heads.fitting.values import head_moments
from collab_heads.layers.values import ValueWeights, read_values
from collab_heads.model.apply_state import SiteWeights, apply_state
from collab_heads.sites.state import QueryKeyState, ValueState


class Values(Part):
    """The width of a value head, the same for all heads of a site."""

    name, field, column, heading = "values", "value", "values", "value width"

    def capability(self, kind):
        return "values"

    def whole(self, shape):
        """Return d_v."""
        return shape.geometry.dim_value

    def sizes(self, shape):
        return narrower(self.whole(shape)) if self.name in shape.parts else []

    def resized(self, shape, choice, geometry):
        """Return the geometry with narrower values.

        Stock attention supports only one width, so a stock site also gets a projection that holds its weights.
        """
        width, query_key = choice.get(self.name), geometry.query_key
        if width is None or not geometry.num_heads:
            return geometry
        if query_key is None:
            exact = geometry.num_heads * geometry.dim_head
            sizes, bias = (exact, geometry.dim_head), geometry.biases[0]
            query_key = QueryKeyState(shape.exact_kind, *sizes, shape.scale, bias, groups=geometry.groups)
        return replace(geometry, dim_value=width, query_key=query_key)

    def allows(self, shape, choice, geometry):
        """Return False if the choice would make a step of decoding slower than it is now.

        Kernels need one width, so every step pads all that is cached of the narrower of keys and values. If only one of
        them is narrower, this costs more than it saves (measured: `benchmarks/compression_speed.py`).
        """
        may_differ = shape.geometry.query_key is not None or not {"query_key", self.name} <= set(shape.parts)
        is_even = (choice.get("query_key") is None) == (choice.get(self.name) is None)
        return may_differ or is_even or not shape.decodes

    def errors(self, site, shape, fitted, held):
        """Measure the error with the `QuickHeads` of each width."""
        if not self.sizes(shape):
            return {}
        weights, shown, errors = read_values(site.value, site.output), held.outputs[site.path], {}
        moments = head_moments(weights, site.groups, fitted.outputs[site.path], has_gates=False)
        heads, whole = QuickHeads(weights, site.groups, moments), spread(float64(weights.output), shown)
        for width in self.sizes(shape):
            lost = heads.narrow(width).lost
            errors[width] = share(lost, lost @ moments.mean, shown, whole)
        return errors

    def fit(self, fitting):
        """Narrow the values of the heads that stay."""
        if not fitting.site.is_swapped and fitting.choice.get("query_key") is None:  # also one that was given back
            fitting.fits.append(fitted_projection(fitting))
        site, geometry = fitting.site, fitting.geometry
        plan = plan_values(site, geometry.dim_value * geometry.key_heads)
        seen = fitting.calibrations.outputs.pop(site.path, None)
        narrow = fit_values(plan, seen, quick=fitting.options is QUICK)  # its error is that which `errors` measures
        fitting.fits.append(NarrowValues(narrow.weights, plan.state))

    def resize(self, site, state, shape, geometry):
        """Keep the leading rows."""
        if geometry.dim_value < shape.geometry.dim_value:
            whole = shape.geometry.dim_value if state.values is None else state.values.dim_head
            state = replace(state, values=ValueState(geometry.dim_value, whole))
            apply_state(site, state)
        return state

    def total(self, geometry):
        """Return the width over all key heads."""
        return geometry.key_heads * geometry.dim_value


@dataclass(frozen=True)
class NarrowValues(Fit):
    """The fitted narrower values of a site, with the state to record."""

    weights: ValueWeights
    state: ValueState

    def put_into(self, site, state):
        state = replace(state, values=self.state)
        apply_state(site, state, SiteWeights(values=self.weights))
        return state

//! Bandwidth that a tenant could use.

/// Fraction of the limit from which a tenant counts as saturated. A link is never used completely.
const SATURATED: f64 = 0.8;

/// Returns the bandwidth that a tenant could use, in MB/s: its used bandwidth, or that of the link
/// if the tenant saturates its limit, because its demand is then unknown.
///
/// Erratum (Spirit, section 4.2): as printed, a saturated tenant wants the bandwidth of each
/// candidate bundle, so that it neither gains by more nor loses by less. Here the wanted bandwidth
/// is one number for all bundles. The miss ratio is not applied to it a second time.
pub fn wanted(used: f64, limit: f64, link: f64) -> f64 {
    if used >= SATURATED * limit { link } else { used }
}

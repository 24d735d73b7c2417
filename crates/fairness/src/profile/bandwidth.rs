//! Bandwidth that a tenant could use.

/// A tenant that uses at least this fraction of its bandwidth limit counts as saturated. The
/// fraction is less than 1 because a link is never used completely.
const SATURATED_FRACTION_MIN: f64 = 0.8;

/// Returns the bandwidth that a tenant could use, in MB/s. It is the bandwidth `used`, or the
/// bandwidth of the whole link if the tenant saturates its limit, because more demand is then not
/// observable.
///
/// Erratum (Spirit, section 4.2): as printed, the wanted bandwidth of a saturated tenant is the
/// bandwidth of each candidate bundle. Such a tenant would neither gain by more bandwidth nor lose
/// by less. Here the wanted bandwidth is one number for all bundles, and it is not multiplied by
/// the miss ratio a second time.
pub fn wanted(used: f64, limit: f64, link: f64) -> f64 {
    if used >= SATURATED_FRACTION_MIN * limit { link } else { used }
}

//! How much bandwidth a tenant could use.

/// Of its limit, what counts as all: a link is never used to the last byte.
const SATURATED: f64 = 0.8;

/// Bandwidth (MB/s) that a tenant could use: what it does use, or the link's where it uses all that it may have and so nobody knows.
///
/// Spirit 4.2, resolved: as printed, a tenant that uses all it may have is taken to want whatever it is offered, at each offer anew; then it gains nothing
/// from more and loses nothing from less. Here it is one number, the same for all offers, and misses are not counted a second time in it.
pub fn wanted(used: f64, limit: f64, link: f64) -> f64 {
    if used >= SATURATED * limit { link } else { used }
}

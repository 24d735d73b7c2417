//! What was seen of a tenant's memory, whoever looked: regions, and how often their pages are touched.

use fairness::profile::Histogram;

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Between two looks at a page, in microseconds: who touches it more often in that time is seen once.
pub const LOOK_US: u64 = 50_000;
/// Looks that count, at most; and how finely parts of one are told apart.
const LOOKS: u32 = 40;
const PARTS: u32 = 1000;

/// Who looked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eyes {
    /// The kernel's DAMON.
    Damon,
    /// A processor of Intel's, by samples of loads that miss its last cache.
    Pebs,
    /// A processor of AMD's, by samples of loads and stores.
    Ibs,
}

impl Eyes {
    /// As it is told.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Damon => "damon",
            Self::Pebs => "pebs",
            Self::Ibs => "ibs",
        }
    }
}

/// A region of a process's memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Region {
    /// How large.
    pub bytes: u64,
    /// In what part of looks a page of it was touched, 0 to 1.
    pub touched: f64,
}

/// What was seen of one tenant.
#[derive(Clone, Debug, PartialEq)]
pub struct Watched {
    /// By whom.
    pub by: Eyes,
    /// Where.
    pub regions: Vec<Region>,
}

impl Watched {
    /// Bytes that were touched at all.
    pub fn touched_bytes(&self) -> u64 {
        self.touched().map(|region| region.bytes).sum()
    }

    /// Pages touched in a second; those that are touched again before the next look count once.
    pub fn pages_per_second(&self) -> f64 {
        let pages = |region: &Region| region.bytes as f64 / PAGE as f64 * region.touched;
        self.touched().map(pages).sum::<f64>() / (LOOK_US as f64 / 1e6)
    }

    /// How often each block of so many bytes was touched, of so many [`LOOKS`].
    pub fn histogram(&self, bytes: u64) -> Histogram {
        let bytes = bytes.max(PAGE);
        let blocks = self.touched().flat_map(move |region| {
            let count = usize::try_from(region.bytes.div_ceil(bytes)).unwrap_or(usize::MAX);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of them")]
            let touched = (region.touched * f64::from(LOOKS * PARTS)).round().max(1.0) as u32;
            std::iter::repeat_n(touched, count)
        });
        Histogram::in_parts(blocks, PARTS)
    }

    fn touched(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter().filter(|region| region.touched > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_every_look_is_touched_twenty_times_a_second() {
        let region = |pages: u64, touched| Region { bytes: pages * PAGE, touched };
        let seen =
            Watched { by: Eyes::Damon, regions: vec![region(2, 1.0), region(256, 0.0), region(8, 0.5)] };
        assert_eq!(seen.touched_bytes(), 10 * PAGE);
        assert_eq!(seen.pages_per_second(), 20.0 * (2.0 + 4.0));
        assert_eq!(seen.histogram(PAGE).samples(), 2 * 40 + 8 * 20);
        assert_eq!(
            seen.histogram(4 * PAGE).samples(),
            40 + 2 * 20,
            "the last block of a region is part of one"
        );
    }
}

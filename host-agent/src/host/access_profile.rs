//! Access profile of a tenant's memory, from any source: regions, with the access rate of their
//! pages.

use fairness::profile::Histogram;

use super::memory::usage::PAGE;

/// Interval between samples of a page, in microseconds: several accesses within it count once.
pub const SAMPLE_INTERVAL_US: u64 = 50_000;
/// Number of aggregated samples, and resolution of fractions of one.
pub const SAMPLES_PER_RESULT: u32 = 40;
const FRACTION_UNITS: u32 = 1000;

/// Source of a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessSource {
    /// The kernel's DAMON.
    Damon,
    /// A processor of Intel's, by samples of loads that miss its last cache.
    Pebs,
    /// A processor of AMD's, by samples of loads and stores.
    Ibs,
}

impl AccessSource {
    /// Returns its name in reports.
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
    /// Size.
    pub bytes: u64,
    /// Fraction of samples in which a page of it was accessed, 0 to 1.
    pub touched: f64,
}

/// Access profile of one tenant.
#[derive(Clone, Debug, PartialEq)]
pub struct AccessProfile {
    /// Source.
    pub source: AccessSource,
    /// Regions.
    pub regions: Vec<Region>,
}

impl AccessProfile {
    /// Returns the number of bytes accessed at least once.
    pub fn touched_bytes(&self) -> u64 {
        self.accessed_regions().map(|region| region.bytes).sum()
    }

    /// Returns the accessed pages per second; several accesses of a page within a sample interval
    /// count once.
    pub fn pages_per_second(&self) -> f64 {
        let pages = |region: &Region| region.bytes as f64 / PAGE as f64 * region.touched;
        self.accessed_regions().map(pages).sum::<f64>() / (SAMPLE_INTERVAL_US as f64 / 1e6)
    }

    /// Returns the fraction of the accessed addresses that can have memory, for a number of bytes:
    /// regions contain addresses.
    pub fn resident_fraction(&self, bytes: u64) -> f64 {
        (bytes as f64 / self.touched_bytes().max(1) as f64).min(1.0)
    }

    /// Returns the access counts of blocks of a size in bytes, of 40 samples. Pages of a block have
    /// similar access rates and any location.
    pub fn histogram(&self, bytes: u64) -> Histogram {
        let mut regions: Vec<Region> = self.accessed_regions().copied().collect();
        regions.sort_by(|one, other| other.touched.total_cmp(&one.touched));
        let (mut counts, mut block) = (Vec::new(), Block::default());
        for Region { bytes: mut remaining, touched } in regions {
            while remaining > 0 {
                let part = remaining.min(bytes.max(PAGE) - block.bytes);
                remaining -= part;
                block.bytes += part;
                block.touched += touched * part as f64;
                if block.bytes == bytes.max(PAGE) {
                    counts.push(std::mem::take(&mut block).count());
                }
            }
        }
        counts.extend((block.bytes > 0).then(|| block.count()));
        Histogram::with_unit(counts, FRACTION_UNITS)
    }

    fn accessed_regions(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter().filter(|region| region.touched > 0.0)
    }
}

/// Memory counted as one block.
#[derive(Clone, Copy, Debug, Default)]
struct Block {
    bytes: u64,
    /// Sum over its bytes of the fraction of samples with an access.
    touched: f64,
}

impl Block {
    fn count(self) -> u32 {
        let touched = self.touched / self.bytes as f64;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a fraction of all samples"
        )]
        let count = (touched * f64::from(SAMPLES_PER_RESULT * FRACTION_UNITS)).round() as u32;
        count.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_combines_small_regions_into_blocks() {
        let regions = vec![Region { bytes: PAGE, touched: 1.0 }; 1000];
        let profile = AccessProfile { source: AccessSource::Pebs, regions };
        assert_eq!(profile.histogram(256 * PAGE).samples(), 4 * 40);
    }

    #[test]
    fn always_accessed_page_counts_twenty_per_second() {
        let region = |pages: u64, touched| Region { bytes: pages * PAGE, touched };
        let profile = AccessProfile {
            source: AccessSource::Damon,
            regions: vec![region(2, 1.0), region(256, 0.0), region(8, 0.5)],
        };
        assert_eq!(profile.touched_bytes(), 10 * PAGE);
        assert_eq!(profile.pages_per_second(), 20.0 * (2.0 + 4.0));
        assert_eq!(profile.histogram(PAGE).samples(), 2 * 40 + 8 * 20);
        assert_eq!(profile.histogram(4 * PAGE).samples(), 30 + 20 + 20, "blocks of 2 + 2, 4 and 2 pages");
        assert_eq!(profile.resident_fraction(5 * PAGE), 0.5);
    }
}

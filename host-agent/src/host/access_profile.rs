//! Access profile of a tenant's memory: regions with the access rate of their pages, as measured by
//! DAMON or by processor samples.

use fairness::profile::Histogram;

use super::memory::usage::PAGE_BYTES;

/// Interval between samples of a page, in microseconds. Several accesses within an interval count
/// as a single access.
pub const SAMPLE_INTERVAL_US: u64 = 50_000;
/// Number of samples per result, so that a result covers 2 s.
pub const SAMPLES_PER_RESULT: u32 = 40;
/// Histogram units per sample, so that fractions of a sample can be counted.
const HISTOGRAM_UNITS_PER_SAMPLE: u32 = 1000;

/// Mechanism that measured an access profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessSource {
    /// DAMON of the Linux kernel.
    Damon,
    /// PEBS of Intel processors, which samples loads that miss the last-level cache.
    Pebs,
    /// IBS of AMD processors, which samples loads and stores.
    Ibs,
}

impl AccessSource {
    /// Returns the name of the source in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Damon => "damon",
            Self::Pebs => "pebs",
            Self::Ibs => "ibs",
        }
    }
}

/// Region of a process's address space whose pages have a similar access rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Region {
    /// Size of the region, in bytes.
    pub bytes: u64,
    /// Fraction of the samples in which a page of the region was accessed, 0 to 1.
    pub touched: f64,
}

/// Access profile of one tenant.
#[derive(Clone, Debug, PartialEq)]
pub struct AccessProfile {
    /// Mechanism that measured the profile.
    pub source: AccessSource,
    /// Measured regions of all processes of the tenant.
    pub regions: Vec<Region>,
}

impl AccessProfile {
    /// Returns the total size of the regions that were accessed at least once, in bytes.
    pub fn touched_bytes(&self) -> u64 {
        self.accessed_regions().map(|region| region.bytes).sum()
    }

    /// Returns the number of page accesses per second. Several accesses of a page within a sample
    /// interval count as a single access.
    pub fn pages_per_second(&self) -> f64 {
        let pages = |region: &Region| region.bytes as f64 / PAGE_BYTES as f64 * region.touched;
        self.accessed_regions().map(pages).sum::<f64>() / (SAMPLE_INTERVAL_US as f64 / 1e6)
    }

    /// Returns the fraction of the accessed address space that can be backed by `bytes` bytes of
    /// memory, 0 to 1. Regions are address ranges, and may contain addresses without memory.
    pub fn resident_fraction(&self, bytes: u64) -> f64 {
        (bytes as f64 / self.touched_bytes().max(1) as f64).min(1.0)
    }

    /// Returns the histogram of access counts of blocks of `bytes` bytes, in [`SAMPLES_PER_RESULT`]
    /// samples. A block consists of pages with similar access rates. These pages need not be
    /// adjacent.
    pub fn histogram(&self, bytes: u64) -> Histogram {
        let mut regions: Vec<Region> = self.accessed_regions().copied().collect();
        regions.sort_by(|a, b| b.touched.total_cmp(&a.touched));
        let (mut counts, mut block) = (Vec::new(), Block::default());
        for Region { bytes: mut remaining, touched } in regions {
            while remaining > 0 {
                let part = remaining.min(bytes.max(PAGE_BYTES) - block.bytes);
                remaining -= part;
                block.bytes += part;
                block.touched += touched * part as f64;
                if block.bytes == bytes.max(PAGE_BYTES) {
                    counts.push(std::mem::take(&mut block).count());
                }
            }
        }
        counts.extend((block.bytes > 0).then(|| block.count()));
        Histogram::with_unit(counts, HISTOGRAM_UNITS_PER_SAMPLE)
    }

    fn accessed_regions(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter().filter(|region| region.touched > 0.0)
    }
}

/// Block of the histogram while it is filled.
#[derive(Clone, Copy, Debug, Default)]
struct Block {
    bytes: u64,
    /// Sum of [`Region::touched`] over all bytes of the block.
    touched: f64,
}

impl Block {
    fn count(self) -> u32 {
        let touched = self.touched / self.bytes as f64;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 40,000")]
        let count = (touched * f64::from(SAMPLES_PER_RESULT * HISTOGRAM_UNITS_PER_SAMPLE)).round() as u32;
        count.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_combines_small_regions_into_blocks() {
        let regions = vec![Region { bytes: PAGE_BYTES, touched: 1.0 }; 1000];
        let profile = AccessProfile { source: AccessSource::Pebs, regions };
        assert_eq!(profile.histogram(256 * PAGE_BYTES).samples(), 4 * 40);
    }

    #[test]
    fn always_accessed_page_has_twenty_accesses_per_second() {
        let region = |pages: u64, touched| Region { bytes: pages * PAGE_BYTES, touched };
        let profile = AccessProfile {
            source: AccessSource::Damon,
            regions: vec![region(2, 1.0), region(256, 0.0), region(8, 0.5)],
        };
        assert_eq!(profile.touched_bytes(), 10 * PAGE_BYTES);
        assert_eq!(profile.pages_per_second(), 20.0 * (2.0 + 4.0));
        assert_eq!(profile.histogram(PAGE_BYTES).samples(), 2 * 40 + 8 * 20);
        assert_eq!(
            profile.histogram(4 * PAGE_BYTES).samples(),
            30 + 20 + 20,
            "blocks of 2 + 2, 4 and 2 pages"
        );
        assert_eq!(profile.resident_fraction(5 * PAGE_BYTES), 0.5);
    }
}

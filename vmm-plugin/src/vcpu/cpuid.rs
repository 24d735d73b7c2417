//! What a processor says of itself: what KVM can do, with the guest's own topology in place of the host's. Each node with
//! processors is a package; a processor is a core with one thread.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm};

use super::mce::Vendor;
use crate::layout::Layout;

const FEATURES: u32 = 1;
const CACHES: u32 = 4;
const TOPOLOGY: u32 = 0xb;
const TOPOLOGY_OF_DIES: u32 = 0x1f;
const AMD_FEATURES: u32 = 0x8000_0001;
const AMD_SVM: u32 = 0x8000_000a;
const POWER_AND_RAS: u32 = 0x8000_0007;
const AMD_SIZES: u32 = 0x8000_0008;
const AMD_CACHES: u32 = 0x8000_001d;
const AMD_TOPOLOGY: u32 = 0x8000_001e;

const HYPERVISOR: u32 = 1 << 31;
const TSC_DEADLINE: u32 = 1 << 24;
/// Of [`FEATURES`] in ECX.
const VMX: u32 = 1 << 5;
/// Of [`AMD_FEATURES`] in ECX.
const SVM: u32 = 1 << 2;
const HYPERTHREADING: u32 = 1 << 28;
/// Of [`POWER_AND_RAS`] in EBX, as AMD has it: a guest survives an uncorrectable memory error (SUCCOR) and a second one before it
/// has read the first (OVERFLOW_RECOV).
const SUCCOR_OVERFLOW_RECOV: u32 = 0b11;
/// The last level of caches is what the processors of a package share.
const SHARED_LEVEL: u32 = 3;

/// Where a processor is.
struct Place {
    apic_id: u32,
    /// Processors in its package, as a power of two.
    shift: u32,
    package: u32,
    /// Whether it has VMX or SVM.
    nested: bool,
    vendor: Vendor,
}

/// Returns the CPUID of a guest's processor. VMX and SVM are hidden unless `nested`: they are a large part of what a guest can
/// attack in the host's KVM.
pub(super) fn of(kvm: &Kvm, layout: &Layout, cpu: u32, nested: bool) -> Result<CpuId, kvm_ioctls::Error> {
    let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
    let deadline = kvm.check_extension(Cap::TscDeadlineTimer);
    let place = Place {
        apic_id: layout.apic_id(cpu),
        shift: layout.package_shift(),
        package: layout.node_of_cpu(cpu),
        nested,
        vendor: Vendor::of(&supported),
    };
    let known = supported.as_slice().iter().filter(|e| ![TOPOLOGY, TOPOLOGY_OF_DIES].contains(&e.function));
    let mut entries: Vec<_> = known.map(|entry| place.adapted(*entry, deadline)).collect();
    entries.extend(place.levels());
    CpuId::from_entries(&entries).map_err(|_| kvm_ioctls::Error::new(libc::E2BIG))
}

impl Place {
    fn in_package(&self) -> u32 {
        1 << self.shift
    }

    fn adapted(&self, mut entry: kvm_cpuid_entry2, deadline: bool) -> kvm_cpuid_entry2 {
        let others = self.in_package() - 1;
        match entry.function {
            FEATURES => {
                entry.ebx = entry.ebx & 0xffff | self.in_package() << 16 | self.apic_id << 24;
                entry.ecx |= HYPERVISOR | if deadline { TSC_DEADLINE } else { 0 };
                entry.ecx &= if self.nested { u32::MAX } else { !VMX };
                entry.edx = entry.edx & !HYPERTHREADING | if others > 0 { HYPERTHREADING } else { 0 };
            }
            CACHES if entry.eax & 0x1f != 0 => {
                let sharing = if entry.eax >> 5 & 7 >= SHARED_LEVEL { others } else { 0 };
                entry.eax = entry.eax & 0x3fff | sharing << 14 | others << 26;
            }
            AMD_CACHES if entry.eax & 0x1f != 0 => {
                let sharing = if entry.eax >> 5 & 7 >= SHARED_LEVEL { others } else { 0 };
                entry.eax = entry.eax & 0x3fff | sharing << 14;
            }
            AMD_FEATURES if !self.nested => entry.ecx &= !SVM,
            AMD_SVM if !self.nested => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
            POWER_AND_RAS if self.vendor == Vendor::Amd => entry.ebx |= SUCCOR_OVERFLOW_RECOV,
            AMD_SIZES => entry.ecx = self.shift << 12 | others,
            AMD_TOPOLOGY => {
                entry.eax = self.apic_id;
                entry.ebx = self.apic_id & others;
                entry.ecx = self.package;
            }
            _ => {}
        }
        entry
    }

    /// The levels of the topology: a thread of a core, a core of a package, and no more (Intel's manual, CPUID leaf 0Bh).
    fn levels(&self) -> [kvm_cpuid_entry2; 3] {
        const INDEXED: u32 = kvm_bindings::KVM_CPUID_FLAG_SIGNIFCANT_INDEX;
        const THREADS: u32 = 1;
        const CORES: u32 = 2;
        let level = |index: u32, shift: u32, count: u32, kind: u32| kvm_cpuid_entry2 {
            function: TOPOLOGY,
            index,
            flags: INDEXED,
            eax: shift,
            ebx: count,
            ecx: index | kind << 8,
            edx: self.apic_id,
            ..Default::default()
        };
        [level(0, 0, 1, THREADS), level(1, self.shift, self.in_package(), CORES), level(2, 0, 0, 0)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32) -> kvm_cpuid_entry2 {
        const ALL: u32 = u32::MAX;
        kvm_cpuid_entry2 { function, eax: ALL, ebx: ALL, ecx: ALL, edx: ALL, ..Default::default() }
    }

    #[test]
    fn vmx_and_svm_are_hidden_unless_nested() {
        let adapted = |function, nested| {
            let place = Place { apic_id: 0, shift: 0, package: 0, nested, vendor: Vendor::Amd };
            place.adapted(entry(function), true)
        };
        assert_eq!(adapted(FEATURES, false).ecx, !VMX);
        assert_eq!(adapted(FEATURES, true).ecx, u32::MAX);
        assert_eq!(adapted(AMD_FEATURES, false).ecx, !SVM);
        assert_eq!(adapted(AMD_FEATURES, true).ecx, u32::MAX);
        let hidden = adapted(AMD_SVM, false);
        assert_eq!((hidden.eax, hidden.ebx, hidden.ecx, hidden.edx), (0, 0, 0, 0));
        assert_eq!(adapted(AMD_SVM, true).edx, u32::MAX);
    }
}

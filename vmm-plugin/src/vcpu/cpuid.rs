//! Builds the CPUID of a vCPU from the features that KVM supports and the topology of the guest.
//! Each node with CPUs is a package, and each CPU is a core with one thread.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm};

use super::mce::Vendor;
use crate::layout::Layout;

/// Numbers of the CPUID leaves that are changed.
const LEAF_FEATURES: u32 = 1;
const LEAF_CACHES: u32 = 4;
const LEAF_TOPOLOGY: u32 = 0xb;
const LEAF_TOPOLOGY_V2: u32 = 0x1f;
const LEAF_EXTENDED_FEATURES: u32 = 0x8000_0001;
const LEAF_SVM: u32 = 0x8000_000a;
const LEAF_POWER_AND_RAS: u32 = 0x8000_0007;
const LEAF_ADDRESS_SIZES: u32 = 0x8000_0008;
const LEAF_AMD_CACHES: u32 = 0x8000_001d;
const LEAF_AMD_TOPOLOGY: u32 = 0x8000_001e;

const HYPERVISOR_BIT: u32 = 1 << 31;
const TSC_DEADLINE_BIT: u32 = 1 << 24;
/// Bit in ECX of [`LEAF_FEATURES`].
const VMX: u32 = 1 << 5;
/// Bit in ECX of [`LEAF_EXTENDED_FEATURES`].
const SVM: u32 = 1 << 2;
const HTT: u32 = 1 << 28;
/// Bits in EBX of [`LEAF_POWER_AND_RAS`] on AMD: software can recover from an uncorrectable memory
/// error (SUCCOR) and from overwritten MCA banks (OVERFLOW_RECOV).
const RECOVERY_BITS: u32 = 0b11;
/// Lowest cache level that the CPUs of a package share.
const SHARED_CACHE_LEVEL_MIN: u32 = 3;

/// Position of a vCPU in the topology of the guest.
struct VcpuTopology {
    apic_id: u32,
    /// Number of low APIC ID bits that identify a CPU within its package.
    package_shift: u32,
    package: u32,
    /// Whether the vCPU has VMX or SVM.
    nested: bool,
    vendor: Vendor,
}

/// Returns the CPUID of a vCPU. VMX and SVM are hidden unless `nested` is set, because both are a
/// large part of KVM's attack surface.
pub(super) fn build(kvm: &Kvm, layout: &Layout, cpu: u32, nested: bool) -> Result<CpuId, kvm_ioctls::Error> {
    let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
    let has_tsc_deadline = kvm.check_extension(Cap::TscDeadlineTimer);
    let topology = VcpuTopology {
        apic_id: layout.apic_id(cpu),
        package_shift: layout.package_shift(),
        package: layout.node_of_cpu(cpu),
        nested,
        vendor: Vendor::from_cpuid(&supported),
    };
    let kept =
        supported.as_slice().iter().filter(|e| ![LEAF_TOPOLOGY, LEAF_TOPOLOGY_V2].contains(&e.function));
    let mut entries: Vec<_> = kept.map(|entry| topology.patch_entry(*entry, has_tsc_deadline)).collect();
    entries.extend(topology.topology_leaves());
    CpuId::from_entries(&entries).map_err(|_| kvm_ioctls::Error::new(libc::E2BIG))
}

impl VcpuTopology {
    fn vcpus_per_package(&self) -> u32 {
        1 << self.package_shift
    }

    /// Adapts a leaf that KVM supports to the topology and the options of the guest.
    fn patch_entry(&self, mut entry: kvm_cpuid_entry2, has_tsc_deadline: bool) -> kvm_cpuid_entry2 {
        let others = self.vcpus_per_package() - 1;
        match entry.function {
            LEAF_FEATURES => {
                entry.ebx = entry.ebx & 0xffff | self.vcpus_per_package() << 16 | self.apic_id << 24;
                entry.ecx |= HYPERVISOR_BIT | if has_tsc_deadline { TSC_DEADLINE_BIT } else { 0 };
                entry.ecx &= if self.nested { u32::MAX } else { !VMX };
                entry.edx = entry.edx & !HTT | if others > 0 { HTT } else { 0 };
            }
            LEAF_CACHES if entry.eax & 0x1f != 0 => {
                let sharing = if entry.eax >> 5 & 7 >= SHARED_CACHE_LEVEL_MIN { others } else { 0 };
                entry.eax = entry.eax & 0x3fff | sharing << 14 | others << 26;
            }
            LEAF_AMD_CACHES if entry.eax & 0x1f != 0 => {
                let sharing = if entry.eax >> 5 & 7 >= SHARED_CACHE_LEVEL_MIN { others } else { 0 };
                entry.eax = entry.eax & 0x3fff | sharing << 14;
            }
            LEAF_EXTENDED_FEATURES if !self.nested => entry.ecx &= !SVM,
            LEAF_SVM if !self.nested => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
            LEAF_POWER_AND_RAS if self.vendor == Vendor::Amd => entry.ebx |= RECOVERY_BITS,
            LEAF_ADDRESS_SIZES => entry.ecx = self.package_shift << 12 | others,
            LEAF_AMD_TOPOLOGY => {
                entry.eax = self.apic_id;
                entry.ebx = self.apic_id & others;
                entry.ecx = self.package;
            }
            _ => {}
        }
        entry
    }

    /// Returns the subleaves of the topology leaf: the thread level, the core level, and the final
    /// invalid level (Intel SDM, CPUID leaf 0Bh).
    fn topology_leaves(&self) -> [kvm_cpuid_entry2; 3] {
        const INDEXED_FLAG: u32 = kvm_bindings::KVM_CPUID_FLAG_SIGNIFCANT_INDEX;
        const THREAD_LEVEL_TYPE: u32 = 1;
        const CORE_LEVEL_TYPE: u32 = 2;
        let level = |index: u32, package_shift: u32, count: u32, kind: u32| kvm_cpuid_entry2 {
            function: LEAF_TOPOLOGY,
            index,
            flags: INDEXED_FLAG,
            eax: package_shift,
            ebx: count,
            ecx: index | kind << 8,
            edx: self.apic_id,
            ..Default::default()
        };
        [
            level(0, 0, 1, THREAD_LEVEL_TYPE),
            level(1, self.package_shift, self.vcpus_per_package(), CORE_LEVEL_TYPE),
            level(2, 0, 0, 0),
        ]
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
        let patch_entry = |function, nested| {
            let topology =
                VcpuTopology { apic_id: 0, package_shift: 0, package: 0, nested, vendor: Vendor::Amd };
            topology.patch_entry(entry(function), true)
        };
        assert_eq!(patch_entry(LEAF_FEATURES, false).ecx, !VMX);
        assert_eq!(patch_entry(LEAF_FEATURES, true).ecx, u32::MAX);
        assert_eq!(patch_entry(LEAF_EXTENDED_FEATURES, false).ecx, !SVM);
        assert_eq!(patch_entry(LEAF_EXTENDED_FEATURES, true).ecx, u32::MAX);
        let hidden = patch_entry(LEAF_SVM, false);
        assert_eq!((hidden.eax, hidden.ebx, hidden.ecx, hidden.edx), (0, 0, 0, 0));
        assert_eq!(patch_entry(LEAF_SVM, true).edx, u32::MAX);
    }
}

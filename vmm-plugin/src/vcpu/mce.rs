//! Reports uncorrectable memory errors to the guest as machine checks. The guest then loses one
//! page, and the VM continues. The status bits are the same as in QEMU (Intel SDM, volume 3,
//! chapter 17; AMD APM, volume 2, chapter 9).

use std::io;

use kvm_bindings::{CpuId, Msrs, kvm_msr_entry, kvm_x86_mce};
use kvm_ioctls::{Cap, Kvm, VcpuFd};
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};

/// Numbers of ioctls, from linux/kvm.h.
const KVM_X86_SETUP_MCE: libc::c_ulong = 0x4008_ae9c;
const KVM_X86_GET_MCE_CAP_SUPPORTED: libc::c_ulong = 0x8008_ae9d;
const KVM_X86_SET_MCE: libc::c_ulong = 0x4040_ae9e;

/// Number of MCA banks of a vCPU, as in QEMU.
const MCE_BANK_COUNT: u8 = 10;
/// Index of the MCA bank for memory errors, as in QEMU.
const MEMORY_ERROR_BANK: u8 = 9;

const MCG_CTL_P: u64 = 1 << 8;
const MCG_SER_P: u64 = 1 << 24;
const MCG_LMCE_P: u64 = 1 << 27;

const MCG_STATUS_RIPV: u64 = 1;
const MCG_STATUS_EIPV: u64 = 1 << 1;
const MCG_STATUS_MCIP: u64 = 1 << 2;
const MCG_STATUS_LMCE: u64 = 1 << 3;

const MCI_STATUS_VAL: u64 = 1 << 63;
const MCI_STATUS_UC: u64 = 1 << 61;
const MCI_STATUS_EN: u64 = 1 << 60;
const MCI_STATUS_MISCV: u64 = 1 << 59;
const MCI_STATUS_ADDRV: u64 = 1 << 58;
const MCI_STATUS_S: u64 = 1 << 56;
const MCI_STATUS_AR: u64 = 1 << 55;
const MCI_STATUS_DEFERRED: u64 = 1 << 44;
const MCI_STATUS_POISON: u64 = 1 << 43;
/// Intel's MCA error codes for a data load and for memory scrubbing.
const DATA_LOAD_ERROR_CODE: u64 = 0x134;
const SCRUBBING_ERROR_CODE: u64 = 0xc0;
/// Value of MCi_MISC: the reported address is physical, with a granularity of 4 KiB.
const MISC_PHYSICAL_PAGE: u64 = 2 << 6 | 0xc;
const PAGE_BYTES: u64 = 4096;

const IA32_FEAT_CTL: u32 = 0x3a;
const FEAT_CTL_LOCKED: u64 = 1;
const FEAT_CTL_VMX: u64 = 1 << 2;
const FEAT_CTL_LMCE: u64 = 1 << 20;
const IA32_MCG_STATUS: u32 = 0x17a;
const IA32_MCG_CTL: u32 = 0x17b;
const IA32_MC_CTL: u32 = 0x400 + 4 * MEMORY_ERROR_BANK as u32;
const IA32_MCG_EXT_CTL: u32 = 0x4d0;
const LMCE_ENABLED: u64 = 1;
const CR4_MCE: u64 = 1 << 6;

/// Vendor of a processor, which determines the machine check architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Vendor {
    Intel,
    Amd,
}

impl Vendor {
    /// Returns the vendor according to CPUID. Hygon processors are treated as AMD.
    pub(super) fn from_cpuid(cpuid: &CpuId) -> Self {
        const AMD_VENDOR_PREFIX: u32 = u32::from_le_bytes(*b"Auth");
        const HYGON_VENDOR_PREFIX: u32 = u32::from_le_bytes(*b"Hygo");
        let vendor = cpuid.as_slice().iter().find(|entry| entry.function == 0);
        if vendor.is_some_and(|entry| [AMD_VENDOR_PREFIX, HYGON_VENDOR_PREFIX].contains(&entry.ebx)) {
            Self::Amd
        } else {
            Self::Intel
        }
    }
}

/// Machine check support of a vCPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct MachineChecks {
    vendor: Vendor,
    /// Whether local machine checks (LMCE) are supported. Without LMCE, an Intel processor
    /// broadcasts a machine check to all CPUs, and the guest would panic.
    has_lmce: bool,
    /// Whether the guest has more than one vCPU.
    has_multiple_vcpus: bool,
}

impl MachineChecks {
    /// Sets up the MCA banks of a vCPU. The CPUID of the vCPU must be set before. Returns `None` if
    /// KVM does not support the required banks and features.
    pub(super) fn set_up_machine_checks(
        kvm: &Kvm,
        fd: &VcpuFd,
        (vendor, cpus): (Vendor, u32),
        nested: bool,
    ) -> Result<Option<Self>, kvm_ioctls::Error> {
        if kvm.check_extension_int(Cap::Mce) < i32::from(MCE_BANK_COUNT) {
            return Ok(None);
        }
        let mut supported = 0_u64;
        // SAFETY: the ioctl writes a u64, and `supported` is a u64.
        let done = unsafe { ioctl_with_mut_ref(kvm, KVM_X86_GET_MCE_CAP_SUPPORTED, &mut supported) };
        check_ioctl(done)?;
        let needed = MCG_CTL_P | MCG_SER_P;
        if supported & needed != needed {
            return Ok(None);
        }
        let has_lmce = vendor == Vendor::Intel && supported & MCG_LMCE_P != 0;
        let capabilities = needed | if has_lmce { MCG_LMCE_P } else { 0 } | u64::from(MCE_BANK_COUNT);
        // SAFETY: the ioctl reads a u64, and `capabilities` is a u64.
        let done = unsafe { ioctl_with_ref(fd, KVM_X86_SETUP_MCE, &capabilities) };
        check_ioctl(done)?;
        if has_lmce {
            let data = FEAT_CTL_LOCKED | FEAT_CTL_LMCE | if nested { FEAT_CTL_VMX } else { 0 };
            let entry = kvm_msr_entry { index: IA32_FEAT_CTL, data, ..Default::default() };
            fd.set_msrs(&Msrs::from_entries(&[entry]).expect("a single entry fits into the list"))?;
        }
        Ok(Some(Self { vendor, has_lmce, has_multiple_vcpus: cpus > 1 }))
    }

    /// Reports an error in the page of a guest-physical address. Returns whether the guest receives
    /// the report. `is_consumed` means that the current instruction has consumed the error.
    pub(super) fn report(
        self,
        fd: &VcpuFd,
        address: u64,
        is_consumed: bool,
    ) -> Result<bool, kvm_ioctls::Error> {
        if !self.can_guest_handle(fd)? {
            return Ok(false);
        }
        let (status, mcg_status) = self.status_values(is_consumed);
        let addr = address & !(PAGE_BYTES - 1);
        let check = kvm_x86_mce {
            status,
            addr,
            misc: MISC_PHYSICAL_PAGE,
            mcg_status,
            bank: MEMORY_ERROR_BANK,
            ..Default::default()
        };
        // SAFETY: the ioctl reads a kvm_x86_mce, and `check` is a kvm_x86_mce.
        let done = unsafe { ioctl_with_ref(fd, KVM_X86_SET_MCE, &check) };
        check_ioctl(done).map(|()| true)
    }

    /// Returns whether the guest can handle a machine check now. The guest must have enabled
    /// machine checks, and no machine check may be in progress. Otherwise KVM would drop the
    /// machine check or end the guest.
    fn can_guest_handle(self, fd: &VcpuFd) -> Result<bool, kvm_ioctls::Error> {
        if fd.get_sregs()?.cr4 & CR4_MCE == 0 {
            return Ok(false);
        }
        let mut indices = vec![IA32_MCG_STATUS, IA32_MCG_CTL, IA32_MC_CTL];
        indices.extend(self.has_lmce.then_some(IA32_MCG_EXT_CTL));
        let entries: Vec<_> =
            indices.iter().map(|index| kvm_msr_entry { index: *index, ..Default::default() }).collect();
        let mut values = Msrs::from_entries(&entries).expect("four entries fit into the list");
        if fd.get_msrs(&mut values)? < entries.len() {
            return Ok(false);
        }
        let values: Vec<u64> = values.as_slice().iter().map(|entry| entry.data).collect();
        let is_idle = values[0] & MCG_STATUS_MCIP == 0;
        let is_enabled = values[1] == u64::MAX && values[2] == u64::MAX;
        let is_not_broadcast = match self.vendor {
            Vendor::Amd => true,
            Vendor::Intel => {
                !self.has_multiple_vcpus || values.get(3).is_some_and(|set| set & LMCE_ENABLED != 0)
            }
        };
        Ok(is_idle && is_enabled && is_not_broadcast)
    }

    /// Returns the values of MCi_STATUS and MCG_STATUS that report an error.
    fn status_values(self, is_consumed: bool) -> (u64, u64) {
        let valid = MCI_STATUS_VAL | MCI_STATUS_EN | MCI_STATUS_MISCV | MCI_STATUS_ADDRV;
        let status = valid
            | match (self.vendor, is_consumed) {
                (Vendor::Intel, true) => MCI_STATUS_UC | MCI_STATUS_S | MCI_STATUS_AR | DATA_LOAD_ERROR_CODE,
                (Vendor::Intel, false) => MCI_STATUS_UC | MCI_STATUS_S | SCRUBBING_ERROR_CODE,
                (Vendor::Amd, true) => MCI_STATUS_UC | MCI_STATUS_POISON,
                (Vendor::Amd, false) => MCI_STATUS_DEFERRED | MCI_STATUS_POISON,
            };
        let consumed = if is_consumed { MCG_STATUS_EIPV } else { 0 };
        let local = if self.has_lmce && self.has_multiple_vcpus { MCG_STATUS_LMCE } else { 0 };
        (status, MCG_STATUS_MCIP | MCG_STATUS_RIPV | consumed | local)
    }
}

fn check_ioctl(returned: libc::c_int) -> Result<(), kvm_ioctls::Error> {
    let errno = || io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    if returned < 0 { Err(kvm_ioctls::Error::new(errno())) } else { Ok(()) }
}

#[cfg(test)]
mod tests;

//! FADT, MADT and DSDT: processors, interrupt controllers, devices, and the sleep and reset
//! registers.

use acpi_tables::{
    Aml,
    aml::{
        Arg, Device, EISAName, Equal, IO, If, Interrupt, Memory32Fixed, Method, Name, Notify, Package, Path,
        ResourceTemplate, Scope,
    },
    fadt::{FADT, FADTBuilder, Flags},
    gas::{AccessSize, AddressSpace, GAS},
    madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic},
    sdt::Sdt,
};

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};
use crate::{
    layout::Layout,
    platform::{
        MmioWindow, POWER_BUTTON_IRQ, RESET_PORT, RESET_VALUE, SERIAL_IRQ, SERIAL_PORT, SLEEP_PORT,
        SLEEP_TYPE,
    },
};

/// Guest-physical addresses of the interrupt controllers that KVM emulates.
const LOCAL_APIC: u32 = 0xfee0_0000;
const IO_APIC: u32 = 0xfec0_0000;
/// IA-PC boot architecture flags (ACPI 6.5, table 5.10). The guest has no VGA adapter, no CMOS RTC
/// and, as bit 1 is clear, no keyboard controller.
const IAPC_BOOT_ARCH: u16 = NO_VGA | NO_CMOS_RTC;
const NO_VGA: u16 = 1 << 2;
const NO_CMOS_RTC: u16 = 1 << 5;
/// Notification value for a press of the power button (ACPI 6.5, section 5.6.6).
const BUTTON_PRESSED_NOTIFICATION: u8 = 0x80;

/// Returns the FADT, which describes the sleep and reset registers and points to the DSDT.
pub(super) fn fadt(dsdt: u64) -> FADT {
    let port = |port: u16| GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, u64::from(port));
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    fadt.iapc_boot_arch = IAPC_BOOT_ARCH.into();
    fadt.reset_reg = port(RESET_PORT);
    fadt.reset_value = RESET_VALUE;
    fadt.sleep_control_reg = port(SLEEP_PORT);
    fadt.sleep_status_reg = port(SLEEP_PORT + 1);
    fadt.hypervisor_vendor_identity = u64::from_le_bytes(*b"TARN\0\0\0\0").into();
    fadt.finalize()
}

/// Returns the MADT, which lists the local APIC of each CPU and the I/O APIC.
pub(super) fn madt(layout: &Layout) -> MADT {
    let mut madt =
        MADT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION, LocalInterruptController::Address(LOCAL_APIC));
    for cpu in 0..layout.cpus() {
        let byte = |number| u8::try_from(number).expect("CPUs and APIC IDs are below 256");
        madt.add_structure(ProcessorLocalApic::new(
            byte(cpu),
            byte(layout.apic_id(cpu)),
            EnabledStatus::Enabled,
        ));
    }
    madt.add_structure(IoApic::new(0, IO_APIC, 0));
    madt
}

/// Returns the DSDT, which describes the serial port, the power button and the virtio devices.
pub(super) fn dsdt(windows: &[MmioWindow]) -> Vec<u8> {
    let mut dsdt = Sdt::new(*b"DSDT", 36, 6, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    let mut code = Vec::new();
    append_serial_port(&mut code);
    append_power_button(&mut code);
    for (number, window) in windows.iter().enumerate() {
        append_virtio_device(number, window, &mut code);
    }
    let soft_off = Package::new(vec![&SLEEP_TYPE, &0_u8, &0_u8, &0_u8]);
    Name::new(Path::new("_S5_"), &soft_off).to_aml_bytes(&mut code);
    dsdt.append_slice(&code);
    dsdt.as_slice().to_vec()
}

fn append_to_system_bus(device: &dyn Aml, code: &mut Vec<u8>) {
    Scope::new(Path::new("_SB_"), vec![device]).to_aml_bytes(code);
}

fn append_serial_port(code: &mut Vec<u8>) {
    let ports = IO::new(SERIAL_PORT, SERIAL_PORT, 1, 8);
    let line = Interrupt::new(true, true, false, false, SERIAL_IRQ);
    let resources = ResourceTemplate::new(vec![&ports, &line]);
    let device = Device::new(
        Path::new("COM1"),
        vec![
            &Name::new(Path::new("_HID"), &EISAName::new("PNP0501")),
            &Name::new(Path::new("_UID"), &0_u8),
            &Name::new(Path::new("_CRS"), &resources),
        ],
    )
    .aml_bytes();
    append_to_system_bus(&device, code);
}

/// Appends the power button, and the Generic Event Device that reports button presses to the guest.
/// A hardware-reduced platform has no fixed power button.
fn append_power_button(code: &mut Vec<u8>) {
    let button = Device::new(
        Path::new("PWRB"),
        vec![&Name::new(Path::new("_HID"), &EISAName::new("PNP0C0C")), &Name::new(Path::new("_UID"), &0_u8)],
    )
    .aml_bytes();
    append_to_system_bus(&button, code);
    let line = Interrupt::new(true, true, false, false, POWER_BUTTON_IRQ);
    let resources = ResourceTemplate::new(vec![&line]);
    let pressed = Notify::new(&Path::new("\\_SB_.PWRB"), &BUTTON_PRESSED_NOTIFICATION).aml_bytes();
    let is_power_button = Equal::new(&Arg(0), &POWER_BUTTON_IRQ).aml_bytes();
    let notify_if_power_button = If::new(&is_power_button, vec![&pressed]).aml_bytes();
    let events = Device::new(
        Path::new("GED_"),
        vec![
            &Name::new(Path::new("_HID"), &"ACPI0013"),
            &Name::new(Path::new("_UID"), &0_u8),
            &Name::new(Path::new("_CRS"), &resources),
            &Method::new(Path::new("_EVT"), 1, true, vec![&notify_if_power_button]),
        ],
    )
    .aml_bytes();
    append_to_system_bus(&events, code);
}

fn append_virtio_device(number: usize, window: &MmioWindow, code: &mut Vec<u8>) {
    let registers = Memory32Fixed::new(true, window.address, window.bytes);
    let line = Interrupt::new(true, true, false, false, window.line);
    let resources = ResourceTemplate::new(vec![&registers, &line]);
    let uid = u32::try_from(number).expect("the number of a device fits into u32");
    let device = Device::new(
        Path::new(&format!("V{number:03X}")),
        vec![
            &Name::new(Path::new("_HID"), &"LNRO0005"),
            &Name::new(Path::new("_UID"), &uid),
            &Name::new(Path::new("_CCA"), &1_u8),
            &Name::new(Path::new("_CRS"), &resources),
        ],
    )
    .aml_bytes();
    append_to_system_bus(&device, code);
}

/// Encoded AML that can be embedded in other AML. An AML object of acpi_tables borrows its parts;
/// encoded bytes borrow nothing.
struct AmlBytes(Vec<u8>);

impl Aml for AmlBytes {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        sink.vec(&self.0);
    }
}

trait ToAmlBytes {
    fn aml_bytes(self) -> AmlBytes;
}

impl<T: Aml> ToAmlBytes for T {
    fn aml_bytes(self) -> AmlBytes {
        AmlBytes(super::aml_bytes(&self))
    }
}

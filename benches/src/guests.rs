//! Launches a guest under one of several VMMs. Measures the time to its first instruction, the time
//! to the output of its first program, and the memory of the VMM. Requires a host with KVM.

use std::{
    fs,
    io::Read,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use crate::failure::Failure;

/// Path of the patched kernel, without the leading slash. The first instructions of this kernel
/// write a byte to the serial port.
pub const FIRST_INSTRUCTION_KERNEL: &str = "guest/first-instruction";
/// Shell script that the guest's `init` runs. Its output marks the start of the first program.
pub const FIRST_PROGRAM_SCRIPT: &str = "echo FIRST-PROGRAM\nsleep 1000";
/// Output of [`FIRST_PROGRAM_SCRIPT`].
const FIRST_PROGRAM_OUTPUT: &[u8] = b"FIRST-PROGRAM";
/// Output of a kernel patched by [`patch_first_instructions`]. No firmware prints this byte.
const FIRST_INSTRUCTION_OUTPUT: &[u8] = &[1];

/// Machine code of `mov dx, 0x3f8; mov al, 1; out dx, al; hlt; jmp .-1` in real mode.
const REAL_MODE_CODE: &[u8] = &[0xba, 0xf8, 0x03, 0xb0, 0x01, 0xee, 0xf4, 0xeb, 0xfd];
/// Machine code of the instructions in [`REAL_MODE_CODE`], in long mode.
const LONG_MODE_CODE: &[u8] = &[0x66, 0xba, 0xf8, 0x03, 0xb0, 0x01, 0xee, 0xf4, 0xeb, 0xfd];

/// Patches a bzImage so that the first instructions at both entry points write a byte to the serial
/// port. Firmware starts the setup code in real mode (Linux x86 boot protocol), and vmm-plugin
/// starts the kernel at the 64-bit entry point.
pub fn patch_first_instructions(mut kernel: Vec<u8>) -> Vec<u8> {
    const KERNEL_SECTOR_BYTES: usize = 512;
    const SETUP_SECTORS_OFFSET: usize = 0x1f1;
    const JUMP_OFFSET: usize = 0x200;
    const ENTRY_64_OFFSET: usize = 0x200;
    let setup = JUMP_OFFSET + 2 + usize::from(kernel[JUMP_OFFSET + 1]);
    let entry_64 = (usize::from(kernel[SETUP_SECTORS_OFFSET]) + 1) * KERNEL_SECTOR_BYTES + ENTRY_64_OFFSET;
    for (at, code) in [(setup, REAL_MODE_CODE), (entry_64, LONG_MODE_CODE)] {
        kernel[at..at + code.len()].copy_from_slice(code);
    }
    kernel
}

/// VMM to measure, including the machine type of QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vmm {
    /// The VMM of this project, `vmm-plugin`.
    VmmPlugin,
    /// QEMU with its smallest machine type, `microvm`.
    Microvm,
    /// QEMU with its default machine type, `pc`.
    Pc,
}

impl Vmm {
    /// All VMMs, in the order of the report.
    pub const ALL: [Self; 3] = [Self::VmmPlugin, Self::Microvm, Self::Pc];

    /// Returns the name of the VMM in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::VmmPlugin => "vmm-plugin",
            Self::Microvm => "qemu microvm",
            Self::Pc => "qemu pc",
        }
    }

    fn command(self, kernel: &str) -> Command {
        const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1";
        let (kernel, initrd) = (format!("/{kernel}"), "/guest/initrd");
        match self {
            Self::VmmPlugin => {
                let mut vmm = Command::new("vmm-plugin");
                vmm.args([
                    "run",
                    "--uid",
                    "65534",
                    "--gid",
                    "65534",
                    "--vm",
                    "v",
                    "--standalone",
                    "--memory",
                    "size=512MiB",
                    "--kernel",
                    &kernel,
                ]);
                vmm.args(["--initrd", initrd, "--cmdline", &format!("{COMMAND_LINE} pci=off")]); // vmm-plugin has no PCI
                vmm
            }
            Self::Microvm | Self::Pc => {
                let (machine, pci) = if self == Self::Microvm { ("microvm", " pci=off") } else { ("pc", "") };
                // Starts QEMU like the script `/bin/qemu-system-x86_64`, without the start-up time
                // of a shell.
                let mut vmm = Command::new("/qemu/lib/ld-linux-x86-64.so.2");
                vmm.args(["--library-path", "/qemu/lib", "/qemu/bin", "-L", "/qemu/share"]);
                vmm.args([
                    "-machine",
                    &format!("{machine},memory-backend=ram"),
                    "-accel",
                    "kvm",
                    "-cpu",
                    "host",
                ]);
                vmm.args(["-object", "memory-backend-memfd,id=ram,size=512M,share=on", "-m", "512M"]);
                vmm.args([
                    "-nodefaults",
                    "-no-user-config",
                    "-no-reboot",
                    "-display",
                    "none",
                    "-serial",
                    "stdio",
                ]);
                vmm.args(["-kernel", &kernel, "-initrd", initrd, "-append"]);
                vmm.arg(format!("{COMMAND_LINE}{pci}"));
                vmm
            }
        }
    }
}

/// Times of a guest and memory of its VMM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measurement {
    /// VMM that ran the guest.
    pub vmm: Vmm,
    first_instruction: Duration,
    first_program: Duration,
    vmm_kib: u64,
}

impl Measurement {
    /// Returns the time from exec to the guest's first instruction, in ms.
    pub fn first_instruction_ms(&self) -> f64 {
        self.first_instruction.as_secs_f64() * 1e3
    }

    /// Returns the time from exec to the first output of the guest's first program, in ms.
    pub fn first_program_ms(&self) -> f64 {
        self.first_program.as_secs_f64() * 1e3
    }

    /// Returns the proportional set size of the VMM after the output of the first program, in KiB.
    /// Excludes the guest's memory.
    #[allow(clippy::cast_precision_loss, reason = "for a ratio")]
    pub fn vmm_kib(&self) -> f64 {
        self.vmm_kib as f64
    }

    /// Formats the measurement as one line, which [`Measurement::parse_line`] parses.
    pub fn to_line(&self) -> String {
        let index = Vmm::ALL.iter().position(|vmm| *vmm == self.vmm).unwrap_or(0);
        format!(
            "{index} {} {} {}",
            self.first_instruction.as_micros(),
            self.first_program.as_micros(),
            self.vmm_kib
        )
    }

    /// Parses the output of [`Measurement::to_line`]. Returns `None` if the line is invalid.
    pub fn parse_line(line: &str) -> Option<Self> {
        let numbers: Vec<u64> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
        let [index, instruction, program, vmm_kib] = numbers[..] else { return None };
        let vmm = *Vmm::ALL.get(usize::try_from(index).ok()?)?;
        let (first_instruction, first_program) =
            (Duration::from_micros(instruction), Duration::from_micros(program));
        Some(Self { vmm, first_instruction, first_program, vmm_kib })
    }
}

/// Launches two guests, one after another, and returns their measurements. The first guest halts
/// after its first instruction. The second guest boots Linux and runs [`FIRST_PROGRAM_SCRIPT`].
///
/// # Errors
/// [`Failure`] if a VMM does not start, or if its guest does not print the expected output.
pub fn measure(vmm: Vmm) -> Result<Measurement, Failure> {
    let mut first_guest = RunningVmm::launch(vmm, FIRST_INSTRUCTION_KERNEL)?;
    let first_instruction = first_guest.wait_for_output(FIRST_INSTRUCTION_OUTPUT)?;
    drop(first_guest);
    let mut guest = RunningVmm::launch(vmm, "guest/6.12")?;
    let first_program = guest.wait_for_output(FIRST_PROGRAM_OUTPUT)?;
    let vmm_kib = vmm_memory_kib(guest.process.id())?;
    Ok(Measurement { vmm, first_instruction, first_program, vmm_kib })
}

/// Running VMM process, which is killed when this value is dropped.
struct RunningVmm {
    vmm: Vmm,
    process: Child,
    start: Instant,
}

impl RunningVmm {
    fn launch(vmm: Vmm, kernel: &str) -> Result<Self, Failure> {
        let mut command = vmm.command(kernel);
        let start = Instant::now();
        let process = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let process =
            process.map_err(|source| Failure::Start { program: command.get_program().into(), source })?;
        Ok(Self { vmm, process, start })
    }

    /// Waits for this output on the console and returns the time since the launch. This wait has no
    /// time limit, but the emulated host is stopped after `HOST_RUN_TIMEOUT`.
    fn wait_for_output(&mut self, expected: &[u8]) -> Result<Duration, Failure> {
        let console = self.process.stdout.as_mut().expect("stdout is a pipe");
        let mut output = Vec::new();
        let mut buffer = [0; 4096];
        while !output.windows(expected.len()).any(|part| part == expected) {
            let count = console
                .read(&mut buffer)
                .map_err(Failure::file_error("read the console of", self.vmm.name()))?;
            output.extend_from_slice(&buffer[..count]);
            if count == 0 {
                let reply = String::from_utf8_lossy(&output).into_owned();
                return Err(Failure::UnexpectedReply { subject: self.vmm.name().to_owned(), reply });
            }
        }
        Ok(self.start.elapsed())
    }
}

impl Drop for RunningVmm {
    fn drop(&mut self) {
        let _ = self.process.kill(); // kill and wait fail only if the process has ended
        let _ = self.process.wait();
    }
}

/// Returns the proportional set size of a VMM process without the guest's memory, in KiB.
fn vmm_memory_kib(pid: u32) -> Result<u64, Failure> {
    let file = format!("/proc/{pid}/smaps");
    Ok(pss_without_guest(&fs::read_to_string(&file).map_err(Failure::file_error("read", file))?))
}

/// Returns the sum of the proportional set sizes in `smaps`, in KiB. Excludes memfds, because all
/// measured VMMs keep the guest's memory in a memfd.
fn pss_without_guest(smaps: &str) -> u64 {
    let mut is_guest = false;
    let mut sum = 0;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("Pss:") if !is_guest => {
                sum += words.next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0)
            }
            Some(range) if range.contains('-') => is_guest = line.contains("/memfd:"),
            _ => {}
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_memory_is_excluded_from_vmm_memory() {
        let smaps = "5000-6000 r-xp 0 08:01 7 /bin/vmm\nPss:  100 kB\nPss_Dirty: 5 kB\n\
                     7000-8000 rw-s 0 00:01 9 /memfd:local (deleted)\nPss: 9999 kB\n9000-a000 rw-p 0 00:00 0\nPss: 20 kB\n";
        assert_eq!(pss_without_guest(smaps), 120);
    }

    #[test]
    fn measurement_round_trips_as_a_line() {
        let (first_instruction, first_program) = (Duration::from_micros(7), Duration::from_micros(8));
        let measurement = Measurement { vmm: Vmm::Pc, first_instruction, first_program, vmm_kib: 9 };
        assert_eq!(Measurement::parse_line(&measurement.to_line()), Some(measurement));
    }

    #[test]
    fn both_kernel_entries_are_patched_and_header_is_kept() {
        let mut kernel = vec![0; 4096];
        kernel[0x1f1] = 3;
        kernel[0x200..0x206].copy_from_slice(b"\xeb\x6eHdrS");
        let patched = patch_first_instructions(kernel);
        assert_eq!(&patched[0x200..0x206], b"\xeb\x6eHdrS");
        assert!(
            patched[0x270..].starts_with(REAL_MODE_CODE)
                && patched[2048 + 0x200..].starts_with(LONG_MODE_CODE)
        );
    }
}

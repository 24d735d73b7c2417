//! One guest, launched by one of several VMMs: time of its first instruction and of its first
//! program's output, and memory of its VMM. Runs on a host with a KVM that boots Linux.

use std::{
    fs,
    io::Read,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use crate::failure::Failure;

/// Kernel that reports its first instruction.
pub const FIRST_INSTRUCTION: &str = "guest/first-instruction";
/// Script of the guest's `init`.
pub const FIRST_PROGRAM: &str = "echo FIRST-PROGRAM\nsleep 1000";
/// Its output.
const FIRST_WORDS: &[u8] = b"FIRST-PROGRAM";
/// Output of a kernel with replaced first instructions; no firmware prints it.
const FIRST_BYTE: &[u8] = &[1];

/// `mov dx, 0x3f8; mov al, 1; out dx, al; hlt; jmp .-1` of a processor in real mode.
const SPEAK_16: &[u8] = &[0xba, 0xf8, 0x03, 0xb0, 0x01, 0xee, 0xf4, 0xeb, 0xfd];
/// The same of one in long mode.
const SPEAK_64: &[u8] = &[0x66, 0xba, 0xf8, 0x03, 0xb0, 0x01, 0xee, 0xf4, 0xeb, 0xfd];

/// A bzImage that speaks with its first instructions, whichever of its entries is taken: firmware jumps to the setup code in
/// real mode, as Linux's x86 boot protocol says, and we to its 64-bit entry.
pub fn says_its_first_instruction(mut kernel: Vec<u8>) -> Vec<u8> {
    const SECTOR: usize = 512;
    const SETUP_SECTORS: usize = 0x1f1;
    const JUMP: usize = 0x200;
    const ENTRY_64: usize = 0x200;
    let setup = JUMP + 2 + usize::from(kernel[JUMP + 1]);
    let entry_64 = (usize::from(kernel[SETUP_SECTORS]) + 1) * SECTOR + ENTRY_64;
    for (at, code) in [(setup, SPEAK_16), (entry_64, SPEAK_64)] {
        kernel[at..at + code.len()].copy_from_slice(code);
    }
    kernel
}

/// VMM of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vmm {
    /// `vmm-plugin`.
    Ours,
    /// QEMU's smallest machine.
    Microvm,
    /// QEMU's usual one.
    Pc,
}

impl Vmm {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Ours, Self::Microvm, Self::Pc];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ours => "vmm-plugin",
            Self::Microvm => "qemu microvm",
            Self::Pc => "qemu pc",
        }
    }

    fn launch(self, kernel: &str) -> Command {
        const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1";
        let (kernel, initrd) = (format!("/{kernel}"), "/guest/initrd");
        match self {
            Self::Ours => {
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
                vmm.args(["--initrd", initrd, "--cmdline", &format!("{COMMAND_LINE} pci=off")]); // as it has none
                vmm
            }
            Self::Microvm | Self::Pc => {
                let (machine, pci) = if self == Self::Microvm { ("microvm", " pci=off") } else { ("pc", "") };
                // As `/bin/qemu-system-x86_64` does, but without a shell's time.
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

/// Measurements of one guest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// VMM.
    pub vmm: Vmm,
    first_instruction: Duration,
    first_program: Duration,
    own_kib: u64,
}

impl Measured {
    /// From exec to the guest's first instruction, in ms.
    pub fn first_instruction_ms(&self) -> f64 {
        self.first_instruction.as_secs_f64() * 1e3
    }

    /// From exec to the first words of the guest's first program, in ms.
    pub fn first_program_ms(&self) -> f64 {
        self.first_program.as_secs_f64() * 1e3
    }

    /// The VMM's proportional set size then, without the guest's memory, in KiB.
    #[allow(clippy::cast_precision_loss, reason = "for a ratio")]
    pub fn own_kib(&self) -> f64 {
        self.own_kib as f64
    }

    /// As a line.
    pub fn write(&self) -> String {
        let which = Vmm::ALL.iter().position(|vmm| *vmm == self.vmm).unwrap_or(0);
        format!(
            "{which} {} {} {}",
            self.first_instruction.as_micros(),
            self.first_program.as_micros(),
            self.own_kib
        )
    }

    /// Of a line.
    pub fn read(line: &str) -> Option<Self> {
        let numbers: Vec<u64> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
        let [which, instruction, program, own_kib] = numbers[..] else { return None };
        let vmm = *Vmm::ALL.get(usize::try_from(which).ok()?)?;
        let (first_instruction, first_program) =
            (Duration::from_micros(instruction), Duration::from_micros(program));
        Some(Self { vmm, first_instruction, first_program, own_kib })
    }
}

/// Launches two guests, one after the other: one ends with its first instruction.
///
/// # Errors
/// A VMM does not start, or its guest does not speak.
pub fn measure(vmm: Vmm) -> Result<Measured, Failure> {
    let mut first = Running::launch(vmm, FIRST_INSTRUCTION)?;
    let first_instruction = first.speaks(FIRST_BYTE)?;
    drop(first);
    let mut guest = Running::launch(vmm, "guest/6.12")?;
    let first_program = guest.speaks(FIRST_WORDS)?;
    let own_kib = own_memory(guest.process.id())?;
    Ok(Measured { vmm, first_instruction, first_program, own_kib })
}

/// A VMM that is killed when it is dropped.
struct Running {
    vmm: Vmm,
    process: Child,
    begun: Instant,
}

impl Running {
    fn launch(vmm: Vmm, kernel: &str) -> Result<Self, Failure> {
        let mut command = vmm.launch(kernel);
        let begun = Instant::now();
        let process = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let process =
            process.map_err(|source| Failure::Start { program: command.get_program().into(), source })?;
        Ok(Self { vmm, process, begun })
    }

    /// Returns the time from launch to an output. A silent guest ends with its host.
    fn speaks(&mut self, words: &[u8]) -> Result<Duration, Failure> {
        let console = self.process.stdout.as_mut().expect("a pipe was asked for");
        let mut said = Vec::new();
        let mut buffer = [0; 4096];
        while !said.windows(words.len()).any(|part| part == words) {
            let count = console.read(&mut buffer).map_err(Failure::file("hear", self.vmm.name()))?;
            said.extend_from_slice(&buffer[..count]);
            if count == 0 {
                let answer = String::from_utf8_lossy(&said).into_owned();
                return Err(Failure::Answer { what: self.vmm.name().to_owned(), answer });
            }
        }
        Ok(self.begun.elapsed())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.process.kill(); // both fail only if it has ended
        let _ = self.process.wait();
    }
}

/// A process's share of the memory that it maps, but for the guest's, in KiB.
fn own_memory(pid: u32) -> Result<u64, Failure> {
    let file = format!("/proc/{pid}/smaps");
    Ok(pss_without_guest(&fs::read_to_string(&file).map_err(Failure::file("read", file))?))
}

/// Guests' memory is in memfds, of all of these VMMs.
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
    fn a_guests_memory_is_not_its_vmms() {
        let smaps = "5000-6000 r-xp 0 08:01 7 /bin/vmm\nPss:  100 kB\nPss_Dirty: 5 kB\n\
                     7000-8000 rw-s 0 00:01 9 /memfd:local (deleted)\nPss: 9999 kB\n9000-a000 rw-p 0 00:00 0\nPss: 20 kB\n";
        assert_eq!(pss_without_guest(smaps), 120);
    }

    #[test]
    fn a_measurement_survives_its_way_over_a_console() {
        let (first_instruction, first_program) = (Duration::from_micros(7), Duration::from_micros(8));
        let measured = Measured { vmm: Vmm::Pc, first_instruction, first_program, own_kib: 9 };
        assert_eq!(Measured::read(&measured.write()), Some(measured));
    }

    #[test]
    fn both_entries_of_a_kernel_speak_and_its_header_stays() {
        let mut kernel = vec![0; 4096];
        kernel[0x1f1] = 3;
        kernel[0x200..0x206].copy_from_slice(b"\xeb\x6eHdrS");
        let patched = says_its_first_instruction(kernel);
        assert_eq!(&patched[0x200..0x206], b"\xeb\x6eHdrS");
        assert!(patched[0x270..].starts_with(SPEAK_16) && patched[2048 + 0x200..].starts_with(SPEAK_64));
    }
}

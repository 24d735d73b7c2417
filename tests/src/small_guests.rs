//! Small guests of a few instructions: position-independent 64-bit code with the entry point of a
//! Linux kernel. These guests run on any /dev/kvm and end within milliseconds.

use std::{arch::global_asm, fs::File, io::Write as _};

/// Offset of the entry point from the load address of a bzImage.
const ENTRY_OFFSET: usize = 0x200;
const BOOT_SECTOR_BYTES: usize = 512;

global_asm!(
    // Routine that writes RDI in hexadecimal, and a space. Each guest contains its own copy.
    ".macro print_hex_routine",
    "  mov ecx, 16",
    "  mov dx, 0x3f8",
    "5: rol rdi, 4",
    "  mov eax, edi",
    "  and eax, 15",
    "  add eax, 48",
    "  cmp eax, 58",
    "  jb 7f",
    "  add eax, 39",
    "7: out dx, al",
    "  dec ecx",
    "  jnz 5b",
    "  mov al, 32",
    "  out dx, al",
    "  ret",
    ".endm",
    ".pushsection .rodata",
    // Prints "hello" and powers off.
    "small_hello:",
    "  lea rsi, [rip + 9f]",
    "2: mov al, [rsi]",
    "  test al, al",
    "  jz 3f",
    "  mov dx, 0x3f8",
    "  out dx, al",
    "  inc rsi",
    "  jmp 2b",
    "3: mov dx, 0x600",
    "  mov al, 0x34",
    "  out dx, al",
    "4: hlt",
    "  jmp 4b",
    "9: .asciz \"hello\\n\"",
    "small_hello_end:",
    // Requests a reset.
    "small_reset:",
    "  mov dx, 0x602",
    "  mov al, 1",
    "  out dx, al",
    "5: jmp 5b",
    "small_reset_end:",
    // Causes a fault without a handler, which becomes a triple fault.
    "small_crash:",
    "  ud2",
    "small_crash_end:",
    // Finds the SRAT from the root pointer and prints each memory range: node, start, length and
    // flags, in hexadecimal.
    "small_srat:",
    "  mov rbx, 0xe0000",
    "  mov rbx, [rbx + 24]",
    "  mov r12d, [rbx + 4]",
    "  add r12, rbx",
    "  lea r13, [rbx + 36]",
    "2: cmp r13, r12",
    "  jae 8f",
    "  mov rbp, [r13]",
    "  add r13, 8",
    "  cmp dword ptr [rbp], 0x54415253",
    "  jne 2b",
    "  lea r14, [rbp + 48]",
    "  mov r15d, [rbp + 4]",
    "  add r15, rbp",
    "3: cmp r14, r15",
    "  jae 8f",
    "  cmp byte ptr [r14], 1",
    "  jne 4f",
    "  mov edi, [r14 + 2]",
    "  call 6f",
    "  mov rdi, [r14 + 8]",
    "  call 6f",
    "  mov rdi, [r14 + 16]",
    "  call 6f",
    "  mov edi, [r14 + 28]",
    "  call 6f",
    "  mov al, 10",
    "  mov dx, 0x3f8",
    "  out dx, al",
    "4: movzx eax, byte ptr [r14 + 1]",
    "  add r14, rax",
    "  jmp 3b",
    "6: print_hex_routine",
    "8: mov dx, 0x600",
    "  mov al, 0x34",
    "  out dx, al",
    "9: hlt",
    "  jmp 9b",
    "small_srat_end:",
    // Maps the first large page of pool memory at 4 GiB and writes to the page repeatedly. Prints
    // "." before every 1000 writes.
    "small_touch:",
    "  mov qword ptr [0xa020], 0x11003",
    "  mov rax, 0x100000083",
    "  mov [0x11000], rax",
    "  mov rbx, 0x100000000",
    "2: mov al, 46",
    "  mov dx, 0x3f8",
    "  out dx, al",
    "  mov ecx, 1000",
    "3: mov [rbx + rcx * 8], rcx",
    "  dec ecx",
    "  jnz 3b",
    "  jmp 2b",
    "small_touch_end:",
    // Maps 1 GiB of pool memory at 4 GiB and writes to each of its pages in turn. Prints "." after
    // each round.
    "small_sweep:",
    "  mov qword ptr [0xa020], 0x11003",
    "  mov rax, 0x100000083",
    "  mov edi, 0x11000",
    "  mov ecx, 512",
    "2: mov [rdi], rax",
    "  add rdi, 8",
    "  add rax, 0x200000",
    "  dec ecx",
    "  jnz 2b",
    "3: mov rbx, 0x100000000",
    "  mov ecx, 262144",
    "4: mov [rbx], rbx",
    "  add rbx, 4096",
    "  dec ecx",
    "  jnz 4b",
    "  mov al, 46",
    "  mov dx, 0x3f8",
    "  out dx, al",
    "  jmp 3b",
    "small_sweep_end:",
    // Maps the first large page of pool memory at 4 GiB. Prints "." after every 64 rounds, and "!"
    // after an unexpected value.
    "small_count:",
    "  mov qword ptr [0xa020], 0x11003",
    "  mov rax, 0x100000083",
    "  mov [0x11000], rax",
    "  xor r8d, r8d",
    "2: mov rsi, 0x100000000",
    "  mov ecx, 512",
    "3: cmp [rsi], r8",
    "  jne 4f",
    "  inc qword ptr [rsi]",
    "  add rsi, 4096",
    "  dec ecx",
    "  jnz 3b",
    "  inc r8",
    "  test r8b, 63",
    "  jnz 2b",
    "  mov dx, 0x3f8",
    "  mov al, 46",
    "  out dx, al",
    "  jmp 2b",
    "4: mov dx, 0x3f8",
    "  mov al, 33",
    "  out dx, al",
    "5: jmp 5b",
    "small_count_end:",
    // Maps the first large page of pool memory at 4 GiB. For each byte of input, writes to the next
    // half of the page and prints ".".
    "small_type:",
    "  mov qword ptr [0xa020], 0x11003",
    "  mov rax, 0x100000083",
    "  mov [0x11000], rax",
    "  mov rbx, 0x100000000",
    "2: mov dx, 0x3fd",
    "  in al, dx",
    "  test al, 1",
    "  jz 2b",
    "  mov dx, 0x3f8",
    "  in al, dx",
    "  mov ecx, 256",
    "3: mov [rbx], rcx",
    "  add rbx, 4096",
    "  dec ecx",
    "  jnz 3b",
    "  mov al, 46",
    "  out dx, al",
    "  jmp 2b",
    "small_type_end:",
    // Routes interrupt line 5 to vector 0x40, which has no handler. Prints "." until this interrupt
    // is pending, then powers off.
    "small_button:",
    "  mov eax, 0xfee00000",
    "  mov dword ptr [rax + 0xf0], 0x1ff",
    "  mov ebx, 0xfec00000",
    "  mov dword ptr [rbx], 0x1b",
    "  mov dword ptr [rbx + 0x10], 0",
    "  mov dword ptr [rbx], 0x1a",
    "  mov dword ptr [rbx + 0x10], 0x40",
    "  mov rbx, rax",
    "2: mov al, 46",
    "  mov dx, 0x3f8",
    "  out dx, al",
    "  test dword ptr [rbx + 0x220], 1",
    "  jz 2b",
    "  mov dx, 0x600",
    "  mov al, 0x34",
    "  out dx, al",
    "4: hlt",
    "  jmp 4b",
    "small_button_end:",
    // Writes to each 4 KiB page of 512 MiB, then reads 2^22 words of these pages at random
    // addresses, each of which depends on the previous read. Prints both times in TSC ticks, in
    // hexadecimal, and powers off.
    "small_memory:",
    "  rdtsc",
    "  shl rdx, 32",
    "  lea r12, [rax + rdx]",
    "  mov rbx, 0x10000000",
    "  mov r8d, 131072",
    "2: mov [rbx], r8",
    "  add rbx, 4096",
    "  dec r8d",
    "  jnz 2b",
    "  rdtsc",
    "  shl rdx, 32",
    "  lea r13, [rax + rdx]",
    "  mov r9, 6364136223846793005",
    "  mov r10, 1442695040888963407",
    "  mov esi, 1",
    "  mov ecx, 4194304",
    "3: imul rsi, r9",
    "  add rsi, r10",
    "  mov rax, rsi",
    "  shr rax, 35",
    "  and rax, -8",
    "  add rsi, [rax + 0x10000000]",
    "  dec ecx",
    "  jnz 3b",
    "  rdtsc",
    "  shl rdx, 32",
    "  lea r14, [rax + rdx]",
    "  mov rdi, r13",
    "  sub rdi, r12",
    "  call 6f",
    "  mov rdi, r14",
    "  sub rdi, r13",
    "  call 6f",
    "  mov al, 10",
    "  mov dx, 0x3f8",
    "  out dx, al",
    "  mov dx, 0x600",
    "  mov al, 0x34",
    "  out dx, al",
    "4: hlt",
    "  jmp 4b",
    "6: print_hex_routine",
    "small_memory_end:",
    ".popsection",
);

macro_rules! guest {
    ($(#[$doc:meta])* $name:ident, $start:ident, $end:ident) => {
        $(#[$doc])*
        pub fn $name() -> Vec<u8> {
            unsafe extern "C" {
                static $start: u8;
                static $end: u8;
            }
            let (start, end) = (&raw const $start, &raw const $end);
            // SAFETY: both labels enclose the machine code above, which is read-only data of this
            // program.
            to_bz_image(unsafe { std::slice::from_raw_parts(start, end as usize - start as usize) })
        }
    };
}

/// Returns whether small guests can run on this machine. If not, reports the skipped tests. Linux
/// guests do not need this check, because they run inside an emulated host.
pub fn can_run_small_guests() -> bool {
    let result = File::options().read(true).write(true).open("/dev/kvm");
    result.map_err(|error| report_skipped(&format!("guests on this machine's /dev/kvm: {error}"))).is_ok()
}

/// Reports a part that a test skips. `cargo xtask test` prints the skipped parts again at the end.
pub fn report_skipped(part: &str) {
    eprintln!("SKIPPED: {part}");
    if let Some(file) = std::env::var_os("TARN_LEFT_OUT") {
        let file = File::options().append(true).create(true).open(file);
        let result = file.and_then(|mut file| writeln!(file, "{part}"));
        result.expect("the list of skipped parts is writable");
    }
}

guest!(
    /// Returns a guest that prints "hello" and powers off.
    print_hello, small_hello, small_hello_end
);
guest!(
    /// Returns a guest that requests a reset.
    request_reset, small_reset, small_reset_end
);
guest!(
    /// Returns a guest that causes a triple fault.
    cause_triple_fault, small_crash, small_crash_end
);
guest!(
    /// Returns a guest that prints the memory ranges in the SRAT.
    print_srat, small_srat, small_srat_end
);
guest!(
    /// Returns a guest that writes to pool memory in an endless loop and prints its progress.
    write_pool_memory, small_touch, small_touch_end
);
guest!(
    /// Returns a guest that writes to each page of 1 GiB of pool memory in an endless loop and prints
    /// its progress.
    sweep_pool_memory, small_sweep, small_sweep_end
);
guest!(
    /// Returns a guest that increments a counter in each page of the first 2 MiB of its pool memory,
    /// verifies the counters, and prints its progress in an endless loop. After an unexpected value,
    /// the guest prints "!" and stops.
    count_in_large_page, small_count, small_count_end
);
guest!(
    /// Returns a guest that writes to another 1 MiB of pool memory, at most 2 MiB, for each byte of
    /// input. The guest prints "." after each write.
    write_when_typed, small_type, small_type_end
);
guest!(
    /// Returns a guest that prints "." repeatedly until its power button is pressed, then powers
    /// off.
    wait_for_power_button, small_button, small_button_end
);
guest!(
    /// Returns a guest with at least 1 GiB of memory that writes to each 4 KiB page of 512 MiB and
    /// then reads at random addresses. The guest prints both times, in TSC ticks as hexadecimal
    /// numbers of 16 digits, and powers off.
    measure_memory, small_memory, small_memory_end
);

/// Returns a bzImage that contains only this code. The layout follows the Linux boot protocol:
/// header at 0x1f1, setup sectors, kernel.
fn to_bz_image(code: &[u8]) -> Vec<u8> {
    let mut image = vec![0; 2 * BOOT_SECTOR_BYTES];
    image[0x1f1] = 1; // number of setup sectors after the first
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x020f_u16.to_le_bytes());
    image[0x211] = 1; // flag: the kernel is loaded at 1 MiB
    image[0x214..0x218].copy_from_slice(&0x10_0000_u32.to_le_bytes());
    image[0x236] = 1; // flag: the kernel has a 64-bit entry point
    image[0x22c..0x230].copy_from_slice(&0x7fff_ffff_u32.to_le_bytes());
    image.resize(2 * BOOT_SECTOR_BYTES + ENTRY_OFFSET, 0);
    image.extend_from_slice(code);
    image
}

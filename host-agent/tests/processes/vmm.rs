//! A VMM without a guest, for tests: attaches to a VM's memory and does as it is told on its standard input, one word a
//! line, one line of answer each. It ends with its input, or when it is killed.
//!
//! `attach VM descriptors|paths`, `write` (a byte that is not zero at both ends of every region), `zero` (whether every
//! region begins and ends with zero).

use std::{
    fs::File,
    io::{self, BufRead},
    os::unix::fs::FileExt,
    path::Path,
};

use host_memory::{Client, ClientError, Region, VmMemory};
use proto::v1::MemoryForm;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let socket = std::env::args().nth(1).ok_or("which socket?")?;
    let client = Client::connect(Path::new(&socket))?;
    let mut regions = Vec::new();
    for line in io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        println!("{}", obey(&client, &mut regions, &words)?);
    }
    Ok(())
}

fn obey(
    client: &Client,
    regions: &mut Vec<(File, u64)>,
    words: &[&str],
) -> Result<String, Box<dyn std::error::Error>> {
    match words {
        ["attach", vm, form] => {
            let form = if *form == "paths" { MemoryForm::Paths } else { MemoryForm::Descriptors };
            told(client.attach(vm, form).map(|memory| opened(memory, regions)))
        }
        ["write"] => {
            regions.iter().try_for_each(|(file, bytes)| {
                file.write_all_at(b"x", 0).and_then(|()| file.write_all_at(b"x", bytes - 1))
            })?;
            Ok("written".to_owned())
        }
        ["zero"] => Ok(all_zero(regions)?.to_string()),
        _ => Err(format!("no word {words:?}").into()),
    }
}

fn told(result: Result<io::Result<String>, ClientError>) -> Result<String, Box<dyn std::error::Error>> {
    match result {
        Ok(answer) => Ok(answer?),
        Err(ClientError::Refused { reason, message }) => Ok(format!("refused {reason} {message}")),
        Err(error) => Err(error.into()),
    }
}

fn opened(memory: VmMemory, regions: &mut Vec<(File, u64)>) -> io::Result<String> {
    let names: Vec<String> = memory.regions.iter().map(name).collect();
    *regions = memory.regions.into_iter().map(open).collect::<io::Result<_>>()?;
    Ok(format!("attached {}", names.join(" ")))
}

fn name(region: &Region) -> String {
    let slice = region.slice.map_or("local".to_owned(), |(slice, epoch)| format!("{slice}.{epoch}"));
    format!("{slice}={}", region.bytes)
}

fn open(region: Region) -> io::Result<(File, u64)> {
    let bytes = region.bytes;
    Ok((region.into_file()?, bytes))
}

fn all_zero(regions: &[(File, u64)]) -> io::Result<bool> {
    let mut ends = [[0; 1]; 2];
    for (file, bytes) in regions {
        file.read_exact_at(&mut ends[0], 0)?;
        file.read_exact_at(&mut ends[1], bytes - 1)?;
        if ends != [[0], [0]] {
            return Ok(false);
        }
    }
    Ok(true)
}

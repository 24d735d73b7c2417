//! Inputs of a replay: a trace (plain, gzip-compressed or generated), and the manager's address in
//! rack.toml. `sim::trace` parses the rows of a trace.

use std::{
    io::{self, Write as _},
    path::{Path, PathBuf},
    str::FromStr,
};

use cli_runtime::{Failure, Global, open};
use sim::{
    generate::generate,
    trace::{self, Arrival, Strictness, Trace},
};
use units::limits::{CONFIG_FILE_BYTES_MAX, TRACE_ROWS_MAX};

use super::Args;

/// Default number of generated VMs.
const GENERATED_VMS_DEFAULT: usize = 2000;
const COUNT_RULE: &str = "must be generated or generated:COUNT with a COUNT from 1 to 4194304";
const _: () = assert!(TRACE_ROWS_MAX == 4_194_304, "the limit in COUNT_RULE must be TRACE_ROWS_MAX");

/// Source of the VMs of a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Path of a trace file.
    File(PathBuf),
    /// Number of VMs that are generated from the seed.
    Generated(usize),
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("generated") {
            Some("") => Ok(Self::Generated(GENERATED_VMS_DEFAULT)),
            Some(rest) if rest.starts_with(':') => {
                let count = rest[1..].parse().ok().filter(|n| (1..=TRACE_ROWS_MAX).contains(n));
                count.map(Self::Generated).ok_or_else(|| COUNT_RULE.to_owned())
            }
            _ => Ok(Self::File(text.into())),
        }
    }
}

/// Returns the VMs to replay, in the order of arrival.
pub(super) fn read(args: &Args) -> Result<Vec<Arrival>, Failure> {
    let arrivals = match &args.trace {
        Source::Generated(count) => generate(args.seed, *count),
        Source::File(path) => from_file(path, args.lenient)?,
    };
    let count_max = args.limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(TRACE_ROWS_MAX);
    Ok(trace::first(arrivals, count_max))
}

fn from_file(path: &Path, lenient: bool) -> Result<Vec<Arrival>, Failure> {
    let strictness = if lenient { Strictness::Lenient } else { Strictness::Strict };
    let trace = open::table(path, |bytes| trace::read(bytes, strictness))?;
    print_skipped(&trace)?;
    Ok(trace.arrivals)
}

fn print_skipped(trace: &Trace) -> Result<(), Failure> {
    let Some(first) = &trace.first_skipped else { return Ok(()) };
    writeln!(io::stderr().lock(), "{} malformed rows skipped; first: {first}", trace.skipped)
        .map_err(Failure::Output)
}

/// Returns the options of the connection. Without --endpoint, the endpoint is read from rack.toml.
pub(super) fn endpoint(rack: Option<&Path>, global: &Global) -> Result<Global, Failure> {
    let listen = match rack {
        Some(path) if global.endpoint.is_none() => Some(read_listen_endpoint(path)?),
        _ => None,
    };
    Ok(Global { endpoint: global.endpoint.clone().or(listen), ..global.clone() })
}

/// Reads the manager's address from rack.toml and returns it as an endpoint. Other keys are not
/// checked, because the manager checks them.
fn read_listen_endpoint(path: &Path) -> Result<String, Failure> {
    let failed = |errno| Failure::File { operation: "read", path: path.to_owned(), errno };
    let invalid = |problem: String| failed(io::Error::new(io::ErrorKind::InvalidData, problem));
    let bytes = open::bytes(path, CONFIG_FILE_BYTES_MAX)?;
    let text = String::from_utf8(bytes).map_err(|_| invalid("must be UTF-8".to_owned()))?;
    let rack: toml::Table = toml::from_str(&text).map_err(|error| invalid(error.to_string()))?;
    let listen = rack.get("manager").and_then(|manager| manager.get("listen")?.as_str());
    let listen = listen.ok_or_else(|| invalid("manager.listen: must be an address in quotes".to_owned()))?;
    Ok(match (listen.strip_prefix("unix:"), rack.contains_key("tls")) {
        (Some(socket), _) => format!("unix:{}", resolve_path(path, Path::new(socket)).display()),
        (None, true) => format!("https://{listen}"),
        (None, false) => format!("http://{listen}"),
    })
}

/// Resolves a path in rack.toml. A relative path is relative to the directory of rack.toml.
fn resolve_path(rack: &Path, path: &Path) -> PathBuf {
    rack.parent().map_or_else(|| path.to_owned(), |directory| directory.join(path))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn endpoint_of(text: &str) -> Result<String, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rack.toml");
        fs::write(&path, text).unwrap();
        let uri = read_listen_endpoint(&path)
            .map_err(|failure| std::error::Error::source(&failure).unwrap().to_string());
        uri.map(|uri| uri.replace(folder.path().to_str().unwrap(), "FOLDER"))
    }

    #[test]
    fn endpoint_is_read_from_rack_toml() {
        assert_eq!(endpoint_of("[manager]\nlisten = \"127.0.0.1:1\"").unwrap(), "http://127.0.0.1:1");
        assert_eq!(endpoint_of("[manager]\nlisten = \"r1:1\"\n[tls]\nx = 1").unwrap(), "https://r1:1");
        assert_eq!(endpoint_of("[manager]\nlisten = \"unix:/run/m\"").unwrap(), "unix:/run/m");
        assert_eq!(endpoint_of("[manager]\nlisten = \"unix:m\"").unwrap(), "unix:FOLDER/m");
        assert!(endpoint_of("[manager]\nlisten = 7").unwrap_err().starts_with("manager.listen: must be"));
        assert!(endpoint_of("[manager").is_err());
    }

    #[test]
    fn source_generated_with_count_is_not_a_file() {
        assert_eq!("generated".parse(), Ok(Source::Generated(GENERATED_VMS_DEFAULT)));
        assert_eq!("generated:7".parse(), Ok(Source::Generated(7)));
        assert_eq!("generated.csv".parse(), Ok(Source::File("generated.csv".into())));
        for invalid in ["generated:", "generated:0", "generated:x", "generated:99999999999"] {
            assert!(invalid.parse::<Source>().is_err(), "{invalid}");
        }
    }

    #[test]
    fn compressed_trace_is_read_like_plain_trace() {
        let text = "vm_id,arrive_s,depart_s,cores,mem_gb\na,0,9,1,2\nb,1,,2,4\n";
        let folder = tempfile::tempdir().unwrap();
        let (plain, packed) = (folder.path().join("a.csv"), folder.path().join("b"));
        fs::write(&plain, text).unwrap();
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(text.as_bytes()).unwrap();
        fs::write(&packed, gzip.finish().unwrap()).unwrap();
        assert_eq!(from_file(&plain, false).unwrap(), from_file(&packed, false).unwrap());
        assert_eq!(from_file(&plain, false).unwrap().len(), 2);
    }

    #[test]
    fn error_about_truncated_gzip_file_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("torn.gz");
        fs::write(&path, [0x1f, 0x8b, 8, 0]).unwrap();
        assert!(from_file(&path, true).unwrap_err().to_string().contains("torn.gz"));
    }
}

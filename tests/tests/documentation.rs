//! Tests of the commands and configuration snippets in README and docs. The program of each command
//! line parses the command line, and the service of each configuration snippet checks the snippet.
//! `cargo xtask tidy` checks links between pages.

use std::{
    fs,
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use tests::rack::programs_dir;

/// Programs in the documentation that are not part of the repository.
const EXTERNAL_PROGRAMS: &[&str] = &[
    "systemctl",
    "rustup",
    "export",
    "unset",
    "cat",
    "printf",
    "cd",
    "mkdir",
    "chmod",
    "openssl",
    "ip",
    "curl",
    "for",
    "done",
    "echo",
    "redis-cli",
    "redis-benchmark",
];
/// Name of the program that runs development tasks.
const XTASK: &str = "xtask";

struct Snippet {
    location: String,
    language: String,
    text: String,
}

fn repository_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate is in the repository").to_owned()
}

fn documentation_pages() -> Vec<PathBuf> {
    let docs = fs::read_dir(repository_root().join("docs")).expect("docs/ exists");
    let docs = docs.map(|entry| entry.expect("docs/ is readable").path());
    let docs = docs.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let top = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"]
        .map(|name| repository_root().join(name));
    docs.chain(top).collect()
}

fn read_snippets() -> Vec<Snippet> {
    documentation_pages().iter().flat_map(|page| parse_snippets(page)).collect()
}

fn parse_snippets(page: &Path) -> Vec<Snippet> {
    let text = fs::read_to_string(page).expect("the page is readable");
    let mut found: Vec<Snippet> = Vec::new();
    let mut is_inside = false;
    for (number, line) in text.lines().enumerate() {
        match (is_inside, line.strip_prefix("```")) {
            (false, Some(language)) => {
                let location = format!("{}:{}", page.display(), number + 1);
                found.push(Snippet { location, language: language.to_owned(), text: String::new() });
                is_inside = true;
            }
            (true, Some(_)) => is_inside = false,
            (true, None) => {
                let snippet = found.last_mut().expect("a snippet is open");
                snippet.text.push_str(line);
                snippet.text.push('\n');
            }
            (false, None) => {}
        }
    }
    found
}

/// Returns the words of each command in a snippet, without comments, variables and `sudo`.
fn parse_commands(snippet: &Snippet) -> Vec<Vec<String>> {
    let joined = snippet.text.replace("\\\n", " ");
    let lines = joined.lines().map(|line| line.split(" #").next().unwrap_or_default().trim());
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(split_words).filter(|words| !words.is_empty()).collect()
}

fn split_words(line: &str) -> Vec<String> {
    let line = line.trim_end_matches('&').split(" > ").next().unwrap_or_default();
    let mut words: Vec<String> = Vec::new();
    let mut is_quoted = false;
    let mut word = String::new();
    for c in line.chars() {
        match c {
            '\'' => is_quoted = !is_quoted,
            ' ' if !is_quoted => {
                words.extend(Some(std::mem::take(&mut word)).filter(|word| !word.is_empty()))
            }
            _ => word.push(c),
        }
    }
    words.extend(Some(word).filter(|word| !word.is_empty()));
    let is_prefix = |word: &String| word == "sudo" || (word.contains('=') && !word.starts_with('-'));
    words.into_iter().skip_while(is_prefix).collect()
}

/// Runs a program with the words of a command and `--help`. The program parses the words but does
/// not execute the command.
fn parse_with_help(program: &Path, words: &[String]) -> Output {
    let words = words.iter().take_while(|word| *word != "--");
    Command::new(program).args(words).arg("--help").output().expect("the program runs")
}

fn check_command(location: &str, command: &[String]) {
    let (name, arguments) = command.split_first().expect("a command has words");
    let name = Path::new(name).file_name().expect("a command has a name").to_string_lossy().into_owned();
    let output = match name.as_str() {
        "tarn" | "pool-manager" | "host-agent" | "soft-cache" | "vmm-plugin" => {
            parse_with_help(&programs_dir().join(&name), arguments)
        }
        "cargo" if arguments.first().is_some_and(|word| word == XTASK) => {
            parse_with_help(&programs_dir().join(XTASK), &arguments[1..])
        }
        "cargo" | ".ci/run" | "run" => return,
        external => {
            assert!(
                EXTERNAL_PROGRAMS.contains(&external),
                "{location}: {external} is not in EXTERNAL_PROGRAMS"
            );
            return;
        }
    };
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{location}: {}: {error}", command.join(" "));
}

#[test]
fn commands_are_parsed_by_their_programs() {
    let shell = read_snippets().into_iter().filter(|snippet| snippet.language == "sh").collect::<Vec<_>>();
    let mut checked = 0;
    for snippet in &shell {
        for command in parse_commands(snippet) {
            check_command(&snippet.location, &command);
            checked += 1;
        }
    }
    assert!(checked > 50, "only {checked} commands were found");
}

/// Required sections of rack.toml, which are added to snippets that lack them.
const RACK_TOML_SECTIONS: [(&str, &str); 3] = [
    ("[manager]", "[manager]\nlisten = \"unix:/run/tarn/manager.sock\"\nstore = \"store\"\n"),
    ("[[emc]]", "[[emc]]\nname = \"emc0\"\nslices = 4\ndriver = \"emulated\"\npath = \"emc0\"\n"),
    ("[[host]]", "[[host]]\nname = \"h0\"\ncores = 4\nlocal_mib = 1024\nemcs = [\"emc0\"]\n"),
];
/// Required sections of host.toml, which are added to snippets that lack them.
const HOST_TOML_SECTIONS: [(&str, &str); 2] = [
    (
        "[agent]",
        "[agent]\nhost = \"h0\"\nmanager = \"unix:/run/tarn/manager.sock\"\nruntime_dir = \"run\"\ntoken_file = \"h0.token\"\n",
    ),
    ("[backend]", "[backend]\nkind = \"emulated\"\n"),
];

fn with_missing_sections(snippet: &str, sections: &[(&str, &str)]) -> String {
    let missing = sections.iter().filter(|(head, _)| !snippet.lines().any(|line| line.starts_with(head)));
    missing.fold(snippet.to_owned(), |text, (_, section)| format!("{text}\n{section}"))
}

/// Writes a token file that only its owner can read, as the agent requires.
fn write_token(path: &Path) {
    let mut options = fs::OpenOptions::new();
    let mut file =
        options.write(true).create_new(true).mode(0o600).open(path).expect("the token file is created");
    file.write_all(&[b'a'; 32]).expect("the folder is writable");
}

#[test]
fn configuration_snippets_are_accepted() {
    let mut checked = 0;
    for snippet in read_snippets().iter().filter(|snippet| snippet.language == "toml") {
        let is_host =
            ["[agent]", "[backend]", "[symbiosis]", "[tiering]", "[early_eviction]", "[soft_memory]"]
                .iter()
                .any(|head| snippet.text.contains(head));
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("config.toml");
        let (program, text) = match is_host {
            true => ("host-agent", with_missing_sections(&snippet.text, &HOST_TOML_SECTIONS)),
            false => ("pool-manager", with_missing_sections(&snippet.text, &RACK_TOML_SECTIONS)),
        };
        fs::write(&path, &text).expect("the folder is writable");
        write_token(&folder.path().join("h0.token"));
        let check = Command::new(programs_dir().join(program))
            .args(["serve", "--check-config", "--config"])
            .arg(&path)
            .output();
        let output = check.expect("the program runs");
        let error = String::from_utf8_lossy(&output.stderr);
        // Missing certificates and keys are accepted, because the files of the examples do not
        // exist on this machine, and so are folders in which only root can create files.
        let is_file_missing = |line: &str| line.contains(" /etc/tarn/") && line.contains("No such file");
        let is_for_root =
            |line: &str| line.contains("cannot use the folder ") && line.contains("Permission denied");
        let is_expected = error.lines().all(|line| is_file_missing(line) || is_for_root(line));
        assert!(output.status.success() || is_expected, "{}: {error}\n{text}", snippet.location);
        checked += 1;
    }
    assert!(checked >= 5, "only {checked} snippets were found");
}

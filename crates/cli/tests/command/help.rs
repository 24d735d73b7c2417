//! Tests of arguments, help, completions and manual pages.

use clap::Parser as _;
use cli::{Cli, Command, Format, ManagerCommand};
use tempfile::TempDir;

use crate::rack::tarn;

fn parse(arguments: &str) -> Cli {
    Cli::try_parse_from(["tarn"].into_iter().chain(arguments.split_whitespace()))
        .unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn command_line_definition_is_consistent() {
    cli::command().debug_assert();
}

#[test]
fn global_options_are_accepted_anywhere() {
    for arguments in ["-o json get slices", "get -o json slices", "get slices --output json"] {
        let cli = parse(arguments);
        assert_eq!(cli.global.output, Format::Json, "{arguments}");
        assert!(matches!(cli.command, Command::Manager(ManagerCommand::Get(_))), "{arguments}");
    }
}

#[test]
fn resources_have_singular_and_plural_names() {
    for arguments in [
        "get host h1",
        "get hosts h1",
        "get emc",
        "get slice 3",
        "get reservation web",
        "get alarm",
        "get share h1",
    ] {
        assert!(matches!(parse(arguments).command, Command::Manager(ManagerCommand::Get(_))), "{arguments}");
    }
}

#[test]
fn commands_and_arguments_have_help() {
    fn check_command_help(command: &clap::Command) {
        assert!(command.get_about().is_some(), "{} has no help", command.get_name());
        for argument in command.get_arguments() {
            assert!(
                argument.get_help().is_some(),
                "{} {} has no help",
                command.get_name(),
                argument.get_id()
            );
        }
        command.get_subcommands().for_each(check_command_help);
    }
    check_command_help(&cli::command());
}

#[tokio::test]
async fn help_lists_the_exit_codes() {
    let help = tarn("--help").await.stdout;
    for line in ["3    not found", "5    exhausted", "124  timed out", "130  interrupted"] {
        assert!(help.contains(line), "{help}");
    }
}

#[tokio::test]
async fn test_vmm_is_hidden_but_explained() {
    let help = tarn("--help").await.stdout;
    assert!(!help.contains("test-vmm"), "{help}");
    let help = tarn("test-vmm --help").await.stdout;
    assert!(help.contains("without KVM") && help.contains("--verify <MIB>"), "{help}");
    assert_eq!(tarn("stand-in-vm --help").await.code, 2);
}

#[tokio::test]
async fn global_options_are_only_in_the_main_help() {
    let help = tarn("--help").await.stdout;
    assert!(help.contains("--endpoint <URI>") && help.contains("--output <OUTPUT>"), "{help}");
    for arguments in ["commit --help", "commit -h", "get slices --help", "cordon host --help", "plan-vm -h"] {
        let help = tarn(arguments).await.stdout;
        assert!(!help.contains("--endpoint <URI>") && !help.contains("--server-name"), "{arguments}: {help}");
    }
    let help = tarn("commit --help").await.stdout;
    assert!(help.contains("`tarn --help`") && help.lines().count() < 15, "{help}");
    let ran = tarn("commit web --endpoint nonsense: -o json").await;
    assert!(
        ran.code != 0 && ran.stderr.starts_with('{'),
        "every command must accept the global options: {}",
        ran.stderr
    );
}

#[tokio::test]
async fn completions_exist_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let ran = tarn(&format!("completions {shell}")).await;
        assert!(ran.code == 0 && ran.stdout.contains("wait-ready"), "{shell}: {}", ran.stderr);
    }
}

#[tokio::test]
async fn manual_pages_exist_for_every_command() {
    let folder = TempDir::new().unwrap();
    let ran = tarn(&format!("man {}/pages", folder.path().display())).await;
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    for page in [
        "tarn.1",
        "tarn-reserve.1",
        "tarn-get-slices.1",
        "tarn-explain-shares.1",
        "tarn-set-weights.1",
        "tarn-doctor.1",
    ] {
        let text = std::fs::read_to_string(folder.path().join("pages").join(page)).unwrap();
        assert!(text.contains(".SH NAME"), "{page}");
    }
    let ran = tarn("man /dev/null/pages").await;
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("/dev/null/pages"), "{}", ran.stderr);
}

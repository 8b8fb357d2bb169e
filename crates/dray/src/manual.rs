//! Completions and man pages, made from the definitions of the command line.

use std::path::Path;

use clap::{Arg, ArgAction, Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::roff::{Inline, Roff, bold, italic, roman};

use crate::args::Args;
use crate::completions;
use crate::error::{ErrorContext, Failure};
use crate::output;

/// Prints the completions for a shell.
pub fn completions(shell: Shell) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut shown(&Args::command()), "dray", &mut script);
    output::print(completions::with_mount_options(shell, &String::from_utf8_lossy(&script)))
}

/// A command without what is hidden: shells would offer that, too.
fn shown(command: &Command) -> Command {
    let arguments = command.get_arguments().filter(|argument| !argument.is_hide_set());
    let commands = command.get_subcommands().filter(|command| !command.is_hide_set());
    let about = command.get_about().cloned().unwrap_or_default();
    // clap takes words that last; these do, since the process ends when they are printed.
    let lasting = |word: &str| -> &'static str { word.to_owned().leak() };
    let mut bare = Command::new(lasting(command.get_name())).about(about);
    if let Some(version) = command.get_version() {
        bare = bare.version(lasting(version));
    }
    bare.args(arguments.cloned()).subcommands(commands.map(shown))
}

/// Writes a page for the command and one for each subcommand into `dir`.
pub fn man(dir: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(dir)
        .doing(|| format!("cannot make the directory {}", dir.display()))?;
    // Which has no page.
    let mut command = Args::command().disable_help_subcommand(true);
    command.build();
    write_page(dir, "dray", command.clone())?;
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        let name = format!("dray-{}", sub.get_name());
        write_page(dir, &name, sub.clone())?;
    }
    Ok(())
}

fn write_page(dir: &Path, name: &str, command: Command) -> Result<(), Failure> {
    let path = dir.join(format!("{name}.1"));
    let doing = || format!("cannot write {}", path.display());
    let mut page = Vec::new();
    let named = command.clone().display_name(name.to_owned());
    let page_of = clap_mangen::Man::new(named).title(name.to_uppercase()).manual("User Commands");
    let source = concat!("dray ", env!("CARGO_PKG_VERSION"));
    page_of.source(source).render(&mut page).doing(doing)?;
    let page = String::from_utf8_lossy(&page);
    // No date: an argument that is empty is left out, and those behind it move up.
    let page = page.replacen(" 1  \"", " 1 \"\" \"", 1);
    // clap_mangen leaves out the values of options there.
    let mut page = with_section(&page, "SYNOPSIS", "SYNOPSIS", &synopsis(&command));
    if let Some((title, body)) = tail(&command) {
        page = with_section(&page, "EXTRA", title, &body);
    }
    std::fs::write(&path, with_lists_as_they_are(&page)).doing(doing)
}

/// `page` with lines that begin with blanks left alone: those of the options' lists. What is left
/// alone anyway (examples) stays so.
fn with_lists_as_they_are(page: &str) -> String {
    let mut text = String::with_capacity(page.len());
    let (mut in_list, mut left_alone) = (false, false);
    for line in page.lines() {
        left_alone = line == ".nf" || left_alone && line != ".fi";
        if (line.starts_with("  ") && !left_alone) != in_list {
            in_list = !in_list;
            text.push_str(if in_list { ".nf\n" } else { ".fi\n" });
        }
        text.push_str(line);
        text.push('\n');
    }
    text
}

/// `page` with the section `old` replaced by one of the name `new`.
fn with_section(page: &str, old: &str, new: &str, body: &Roff) -> String {
    let head = format!("\n.SH {old}\n");
    let Some((before, rest)) = page.split_once(&head) else { return page.to_owned() };
    let after = rest.find("\n.SH ").map_or("", |end| &rest[end + 1..]);
    format!("{before}\n.SH \"{new}\"\n{}{after}", body.to_roff())
}

/// How the command is called: each option with its value, then the arguments.
fn synopsis(command: &Command) -> Roff {
    let mut words = vec![bold(command.get_bin_name().unwrap_or(command.get_name()))];
    let shown = |arg: &&Arg| !arg.is_hide_set() && arg.get_id() != "help";
    for option in command.get_opts().chain(flags(command)).filter(shown) {
        let short = option.get_short().map(|short| format!("-{short}"));
        let long = option.get_long().map(|long| format!("--{long}"));
        let names: Vec<String> = short.into_iter().chain(long).collect();
        words.extend([roman(" ["), bold(names.join("|"))]);
        if let Some(value) = value_name(option) {
            words.extend([roman(" "), value]);
        }
        words.push(roman(if is_repeated(option) { "]..." } else { "]" }));
    }
    for argument in command.get_positionals().filter(shown) {
        let name = value_name(argument).unwrap_or_else(|| roman(""));
        match argument.is_required_set() {
            true => words.extend([roman(" "), name]),
            false => words.extend([roman(" ["), name, roman("]")]),
        }
    }
    if command.has_subcommands() {
        words.extend([
            roman(" "),
            italic("COMMAND"),
            roman(" ["),
            italic("ARGUMENT"),
            roman("]..."),
        ]);
    }
    let mut section = Roff::new();
    section.text(words);
    section
}

/// Options without a value.
fn flags(command: &Command) -> impl Iterator<Item = &Arg> {
    let named = command.get_arguments().filter(|arg| !arg.is_positional());
    named.filter(|arg| !arg.get_action().takes_values())
}

fn value_name(arg: &Arg) -> Option<Inline> {
    if !arg.get_action().takes_values() {
        return None;
    }
    arg.get_value_names().and_then(|names| names.first()).map(|name| italic(name.as_str()))
}

fn is_repeated(option: &Arg) -> bool {
    let repeated = matches!(option.get_action(), ArgAction::Count | ArgAction::Append);
    repeated && option.get_value_delimiter().is_none()
}

/// What stands behind the options in the help: its title and its lines, as they are.
fn tail(command: &Command) -> Option<(&'static str, Roff)> {
    let text = command.get_after_help()?.to_string();
    let (title, lines) = text.split_once(":\n")?;
    let title = if title == "Examples" { "EXAMPLES" } else { "EXIT STATUS" };
    let mut section = Roff::new();
    section.control("nf", []);
    for line in lines.lines() {
        section.text([roman(line.strip_prefix("  ").unwrap_or(line))]);
    }
    section.control("fi", []);
    Some((title, section))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shells_offer_what_is_meant_for_people() {
        let command = shown(&Args::command());
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command.clone(), "dray", &mut script);
            let script = String::from_utf8(script).unwrap();
            for word in ["serve", "survey", "listen", "foreground", "version"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
            for word in
                ["keep-files", "mount-daemon", "mount-supervisor", "wake-mount", "boot-id", "fake"]
            {
                assert!(!script.contains(word), "{shell}: {word}");
            }
        }
    }

    #[test]
    fn every_subcommand_has_a_page() {
        let dir = tempfile::tempdir().unwrap();
        man(dir.path()).unwrap();
        for name in ["dray", "dray-serve", "dray-mount", "dray-umount", "dray-status"] {
            let page = std::fs::read_to_string(dir.path().join(format!("{name}.1"))).unwrap();
            assert!(page.contains(".TH"), "{name}");
        }
        let serve = std::fs::read_to_string(dir.path().join("dray-serve.1")).unwrap();
        assert!(serve.contains("\\-\\-export") && serve.contains("squash=root"), "{serve}");
        // With values in the synopsis, and what clap_mangen calls "extra" under its own title.
        let synopsis = serve.split(".SH ").find(|section| section.starts_with("\"SYNOPSIS\""));
        assert!(synopsis.is_some_and(|text| text.contains("NAME=DIR")), "{serve}");
        assert!(serve.contains(".SH \"EXAMPLES\"") && !serve.contains(".SH EXTRA"), "{serve}");
        assert!(serve.contains(".nf\n  ro  "), "{serve}");
        // A line that goes on had ended the examples, and those behind it were filled.
        let examples = serve.split(".SH ").find(|section| section.starts_with("\"EXAMPLES\""));
        let ends = examples.map_or(0, |text| text.matches(".fi\n").count());
        assert_eq!(ends, 1, "{serve}");
        // Where the date was missing the version was taken for it.
        assert!(serve.contains(".TH DRAY-SERVE 1 \"\" \"dray"), "{serve}");
        let dray = std::fs::read_to_string(dir.path().join("dray.1")).unwrap();
        assert!(dray.contains(".SH \"EXIT STATUS\""), "{dray}");
        // Every page that another one names is there.
        for line in dray.lines().filter_map(|line| line.strip_suffix("(1)")) {
            let page = format!("{}.1", line.replace('\\', ""));
            assert!(dir.path().join(&page).exists(), "{page}");
        }
        assert!(dray.contains("dray\\-mount(1)"), "{dray}");
    }
}

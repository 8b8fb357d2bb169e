//! Completions of shells behind `mount -o`. clap knows the value as one word; it is a list of options,
//! separated by commas.

use clap_complete::Shell;

use crate::mount::option_names::OFFERED;

/// The script that clap made for a shell, with the options of mounts. Shells that are not named here
/// have what clap gives them.
pub fn with_mount_options(shell: Shell, script: &str) -> String {
    match shell {
        Shell::Bash => for_bash(script),
        Shell::Zsh => for_zsh(script),
        Shell::Fish => for_fish(script),
        _ => script.to_owned(),
    }
}

/// bash takes what stands in front of `=` for a word of its own, so that the whole list is found in
/// the line. What it is given in the end goes behind that.
const BASH: &str = r#"_dray_mount_options() {
    local list="$1" cur="${2#=}" done="" word
    local line="${COMP_LINE:0:${COMP_POINT:-0}}"
    [[ "${line}" =~ [[:space:]]-o[[:space:]]+([^[:space:]]*)$ ]] && list="${BASH_REMATCH[1]}"
    [[ "${list}" == *,* ]] && done="${list%,*},"
    local head="${list%"${cur}"}"
    COMPREPLY=()
    for word in $(compgen -W "WORDS" -- "${list##*,}"); do
        word="${done}${word}"
        COMPREPLY+=("${word#"${head}"}")
    done
    [[ ${#COMPREPLY[@]} -gt 0 ]] || COMPREPLY=("${cur}")
    if [[ "${BASH_VERSINFO[0]}" -ge 4 ]]; then
        compopt -o nospace
    fi
}

"#;

fn for_bash(script: &str) -> String {
    const MOUNT: &str = "        dray__subcmd__mount)\n";
    const CASE: &str = "            case \"${prev}\" in\n";
    const OPTION: &str = "                -o)\n                    COMPREPLY=(\"${cur}\")\n";
    let Some((before, mount)) = script.split_once(MOUNT) else { return script.to_owned() };
    let by_line = "            if [[ \"${COMP_LINE:0:${COMP_POINT:-0}}\" =~ \
                   [[:space:]]-o[[:space:]]+[^[:space:]]*$ ]]; then\n                \
                   _dray_mount_options \"${cur}\" \"${cur}\"\n                return 0\n            fi\n";
    let by_word =
        "                -o)\n                    _dray_mount_options \"${cur}\" \"${cur}\"\n";
    let mount = mount.replacen(CASE, &format!("{by_line}{CASE}"), 1).replacen(OPTION, by_word, 1);
    format!("{}{before}{MOUNT}{mount}", BASH.replace("WORDS", &OFFERED.join(" ")))
}

fn for_zsh(script: &str) -> String {
    let mut all: Vec<String> = Vec::new();
    for word in OFFERED {
        match word.split_once('=') {
            None => all.push(format!("'{word}'")),
            Some((key, _)) if all.iter().any(|one| one.starts_with(&format!("'{key}:"))) => {}
            Some((key, _)) => {
                let values = OFFERED.iter().filter_map(|one| one.split_once('='));
                let values = values.filter(|(other, _)| *other == key).map(|(_, value)| value);
                let values = values.map(|value| value.replace(':', "\\:"));
                let values = values.collect::<Vec<_>>().join(" ");
                let values = if values.is_empty() { " ".to_owned() } else { format!("({values})") };
                all.push(format!("'{key}:{key}:{values}'"));
            }
        }
    }
    let function =
        format!("_dray_mount_options() {{\n    _values -s , option {}\n}}\n\n", all.join(" "));
    // The file's first line says what it completes, and stays the first.
    let script = script.replace(":OPTION,...:' \\", ":OPTION,...:_dray_mount_options' \\");
    match script.split_once("\n\n") {
        Some((first, rest)) => format!("{first}\n\n{function}{rest}"),
        None => script,
    }
}

fn for_fish(script: &str) -> String {
    let words = OFFERED.join(" ");
    format!(
        "{script}complete -c dray -n \"__fish_dray_using_subcommand mount\" -s o -x \
         -a '(__fish_append , {words})'\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Args;
    use clap::CommandFactory;

    /// The completions offered no options of mounts.
    #[test]
    fn options_of_mounts_are_offered_where_they_go() {
        for (shell, word) in [
            (Shell::Bash, "_dray_mount_options \"${cur}\""),
            (Shell::Zsh, ":OPTION,...:_dray_mount_options' \\"),
            (Shell::Zsh, "'consistency:consistency:(strict close-to-open immutable)'"),
            (Shell::Zsh, "'auth:auth:(psk\\: none)'"),
            (Shell::Fish, "mount\" -s o -x -a '(__fish_append , ro rw"),
        ] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "dray", &mut script);
            let script = with_mount_options(shell, &String::from_utf8(script).unwrap());
            assert!(script.contains(word), "{shell}: {word}");
            assert!(shell != Shell::Zsh || script.starts_with("#compdef dray\n"), "{script}");
        }
    }
}

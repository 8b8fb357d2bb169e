//! `dray qos`.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::args::{QosCommand, QosRemoveArgs, QosSetArgs, QosTopArgs};
use crate::control::{self, ProcessKind};
use crate::error::{EXIT_UNREACHABLE, Failure};
use crate::{evict, output, unresponsive};

/// Longer questions a server does not read.
const QUESTION_MAX_BYTES: usize = 4000;

/// How often `top` looks.
const EVERY: Duration = Duration::from_secs(1);

/// Asks the server.
pub fn run(command: &QosCommand) -> Result<(), Failure> {
    match command {
        QosCommand::Set(args) => set(args),
        QosCommand::Remove(args) => remove(args),
        QosCommand::Show(args) => show(args.state.as_deref(), args.json),
        QosCommand::Top(args) => top(args),
    }
}

fn set(args: &QosSetArgs) -> Result<(), Failure> {
    check_name(&args.name)?;
    let rule = rule_in(&args.settings).map_err(Failure::usage)?;
    let how = if args.keep { "keep" } else { "live" };
    let question = format!("qos set {how} {} {rule}", args.name);
    if question.len() > QUESTION_MAX_BYTES {
        let why = format!(
            "a rule of more than {QUESTION_MAX_BYTES} bytes belongs into the configuration"
        );
        return Err(Failure::usage(why));
    }
    demand(args.state.as_deref(), &question)
}

fn remove(args: &QosRemoveArgs) -> Result<(), Failure> {
    check_name(&args.name)?;
    let how = if args.keep { "keep" } else { "live" };
    demand(args.state.as_deref(), &format!("qos remove {how} {}", args.name))
}

fn check_name(name: &str) -> Result<(), Failure> {
    match name.is_empty() || name.contains(char::is_whitespace) {
        true => Err(Failure::usage("a rule's name is one word")),
        false => Ok(()),
    }
}

/// `KEY=VALUE` as a table: `match.user=a,b` is the list `user` in `match`.
fn rule_in(settings: &[String]) -> Result<Value, String> {
    let (mut rule, mut matches) = (Map::new(), Map::new());
    for setting in settings {
        let (key, value) = setting
            .split_once('=')
            .ok_or_else(|| format!("`{setting}`: a setting looks like limit=200M"))?;
        let before = match key.strip_prefix("match.") {
            Some(key) => {
                matches.insert(key.to_owned(), json!(value.split(',').collect::<Vec<_>>()))
            }
            None => rule.insert(key.to_owned(), json!(value)),
        };
        if before.is_some() {
            return Err(format!("`{key}` is given twice"));
        }
    }
    if !matches.is_empty() {
        rule.insert("match".to_owned(), Value::Object(matches));
    }
    Ok(Value::Object(rule))
}

/// Has one server do something, and the other servers of its projections follow.
fn demand(state: Option<&Path>, question: &str) -> Result<(), Failure> {
    let socket = match &sockets(state)?[..] {
        [one] => one.clone(),
        [] => return Err(nobody()),
        _ => {
            return Err(Failure::usage(
                "several servers run on this machine: say which by --state (`dray status` shows the state \
                 directory of each)",
            ));
        }
    };
    let answer =
        control::ask(&socket, question).map_err(|error| match unresponsive::is_dead(&error) {
            true => nobody(),
            false => Failure::new(unresponsive::sentence(&socket, &error)),
        })?;
    match answer["error"].as_str() {
        Some(why) => Err(Failure::new(why.to_owned())),
        None => print_followers(&answer),
    }
}

/// What became of a change at the other servers of each projection. Errors: it does not count at one of them.
fn print_followers(answer: &Value) -> Result<(), Failure> {
    let (mut refused, mut away) = (Vec::new(), Vec::new());
    for other in answer["others"].as_array().into_iter().flatten() {
        let server = output::plain(other["server"].as_str().unwrap_or_default());
        let export = output::plain(other["export"].as_str().unwrap_or_default());
        let said = |key: &str| other[key].as_str().map(output::plain);
        match (said("refused"), said("away")) {
            (Some(why), _) => refused.push(format!("{server}, export {export}: {why}")),
            (None, Some(why)) => away.push(format!("{server}, export {export}: {why}")),
            (None, None) => output::print_line(format_args!("{server}: done (export {export})"))?,
        }
    }
    if !refused.is_empty() {
        return Err(Failure::new(format!(
            "this server has done it, but it does not count everywhere: {}{}; correct the rule, or what stands \
             in its way there",
            refused.join("; "),
            away.iter().map(|one| format!("; away: {one}")).collect::<String>(),
        )));
    }
    match away.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "this server has done it, but others are away: {}; each follows when it is back, as long as a \
             server that knows of it runs",
            away.join("; ")
        ))
        .nobody_answered()),
    }
}

fn nobody() -> Failure {
    Failure::new(
        "no server of this machine answers: is `dray serve` running, and are you its user?",
    )
}

fn sockets(state: Option<&Path>) -> Result<Vec<PathBuf>, Failure> {
    if let Some(state) = state {
        return evict::server_of(state).map(|socket| vec![socket]);
    }
    let mut sockets = ProcessKind::Server.all();
    sockets.retain(|socket| !matches!(dray_fabric::somebody_listens(socket), Ok(false)));
    Ok(sockets)
}

fn show(state: Option<&Path>, as_json: bool) -> Result<(), Failure> {
    let (mut answered, mut away) = (false, Vec::new());
    for (socket, answer) in control::ask_all(sockets(state)?, "qos show") {
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) if unresponsive::is_dead(&error) => continue,
            Err(error) => return Err(Failure::new(unresponsive::sentence(&socket, &error))),
        };
        answered = true;
        away.extend(servers_away(&answer));
        match as_json {
            true => output::print_line(&answer)?,
            false => print_exports(&answer)?,
        }
    }
    match (answered, away.is_empty()) {
        (false, _) => Err(nobody()),
        (true, true) => Ok(()),
        (true, false) => {
            let what = format!("not among this, since it is away: {}", away.join("; "));
            Err(Failure::new(what).nobody_answered())
        }
    }
}

/// Servers of projections that did not answer the one that was asked.
fn servers_away(answer: &Value) -> Vec<String> {
    let exports = answer["exports"].as_array().into_iter().flatten();
    let others = exports.flat_map(|export| export["others"].as_array().into_iter().flatten());
    let away = others.filter_map(|other| {
        let (server, why) = (other["server"].as_str()?, other["away"].as_str()?);
        Some(format!("{} ({})", output::plain(server), output::plain(why)))
    });
    let mut away: Vec<_> = away.collect();
    away.sort_unstable();
    away.dedup();
    away
}

fn top(args: &QosTopArgs) -> Result<(), Failure> {
    let mut shown = 0;
    loop {
        if !args.json && args.count != 1 && std::io::stdout().is_terminal() {
            output::print("\x1b[H\x1b[2J")?;
        }
        match show(args.state.as_deref(), args.json) {
            // It may be back at the next look.
            Err(away) if away.code == EXIT_UNREACHABLE && args.count != 1 => {
                output::complain(&away.message);
            }
            outcome => outcome?,
        }
        shown += 1;
        if shown == args.count {
            return Ok(());
        }
        std::thread::sleep(EVERY);
    }
}

fn print_exports(answer: &Value) -> Result<(), Failure> {
    for export in answer["exports"].as_array().into_iter().flatten() {
        let name = output::plain(export["name"].as_str().unwrap_or_default());
        let others = export["others"].as_array().map_or(&[][..], Vec::as_slice);
        let here = if others.is_empty() { "" } else { " at this server" };
        print_export(&format!("{name}{here}"), export)?;
        for other in others.iter().filter(|other| other["away"].is_null()) {
            let server = output::plain(other["server"].as_str().unwrap_or_default());
            print_export(&format!("{name} at {server}"), other)?;
        }
    }
    Ok(())
}

/// Of one export at one server.
fn print_export(name: &str, export: &Value) -> Result<(), Failure> {
    for (rule, why) in export["refused"].as_object().into_iter().flatten() {
        let (rule, why) = (output::plain(rule), output::plain(why.as_str().unwrap_or_default()));
        output::print_line(format_args!("export {name}: rule {rule} does not count: {why}"))?;
    }
    let rules = export["rules"].as_object().map_or(0, Map::len);
    if export["qos"].is_null() {
        return output::print_line(format_args!("export {name}: no rules"));
    }
    output::print_line(format_args!("export {name}: {rules} rule(s)"))?;
    for (rule, table) in export["rules"].as_object().into_iter().flatten() {
        let (rule, table) = (output::plain(rule), output::plain(&table.to_string()));
        output::print_line(format_args!("  rule {rule}: {table}"))?;
    }
    output::print_line(format_args!(
        "  {:<32} {:>10} {:>9} {:>8} {:>8} {:>7} {:>8}",
        "CLASS", "MiB/s", "calls/s", "waiting", "wait ms", "share", "entitled"
    ))?;
    for class in export["qos"]["classes"].as_array().into_iter().flatten() {
        print_class(class)?;
    }
    Ok(())
}

fn print_class(class: &Value) -> Result<(), Failure> {
    let text = |key: &str| output::plain(class[key].as_str().unwrap_or_default());
    let number = |key: &str| class[key].as_f64().unwrap_or(0.0);
    let name = match (text("rule"), text("class")) {
        (rule, class) if rule.is_empty() => format!("(no rule){class}"),
        (rule, class) if class.is_empty() => rule,
        (rule, class) => format!("{rule}:{class}"),
    };
    output::print_line(format_args!(
        "  {name:<32} {:>10.1} {:>9.1} {:>8} {:>8.1} {:>6.1}% {:>7.1}%",
        number("bytes_per_s") / f64::from(1 << 20),
        number("calls_per_s"),
        number("waiting"),
        number("wait_s") * 1e3,
        number("share") * 100.0,
        number("entitled") * 100.0,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_become_a_table() {
        let settings = ["match.user=a,b", "limit=1G"].map(str::to_owned);
        let rule = rule_in(&settings).unwrap();
        assert_eq!(rule, json!({ "match": { "user": ["a", "b"] }, "limit": "1G" }));
        assert!(rule_in(&["limit".to_owned()]).unwrap_err().contains("limit=200M"));
        assert!(rule_in(&["a=1".to_owned(), "a=2".to_owned()]).is_err());
    }
}

//! `dray projection`: whether a file of projections can be used, and what it means.

mod shares;

use dray_layers::placement::{Definition, Layout};
use serde_json::{Value, json};

use crate::args::{ProjectionCommand, ProjectionFile};
use crate::error::Failure;
use crate::output;
use crate::serve::projections::{definitions_in, servers_named_twice, unresolved_servers};
use shares::{HomeShares, SliceShares};

/// Checks a file, or shows what it means. Errors: something is wrong in it.
pub fn run(command: &ProjectionCommand) -> Result<(), Failure> {
    match command {
        ProjectionCommand::Check(args) => check(args),
        ProjectionCommand::Show(args) => show(args),
    }
}

/// The projections of the file that are asked for. Errors: all that is wrong in it.
fn read(args: &ProjectionFile) -> Result<Vec<Definition>, Failure> {
    let mut definitions = definitions_in(&args.file)?;
    if let Some(name) = &args.name {
        let names: Vec<String> = definitions.iter().map(|one| one.name.clone()).collect();
        definitions.retain(|one| one.name == *name);
        if definitions.is_empty() {
            return Err(Failure::usage(format!(
                "{}: it has no projection `{name}`, but {}",
                args.file.display(),
                names.join(", ")
            )));
        }
    }
    Ok(definitions)
}

fn check(args: &ProjectionFile) -> Result<(), Failure> {
    let definitions = read(args)?;
    let wrong_in = |one: &Definition| {
        let mut wrong = unresolved_servers(&args.file, one);
        wrong.extend(servers_named_twice(&args.file, one));
        wrong
    };
    let wrong: Vec<String> = definitions.iter().flat_map(wrong_in).collect();
    if !wrong.is_empty() {
        return Err(Failure::new(wrong.join("\n")));
    }
    if args.json {
        return output::print_json(&definitions.iter().map(summary).collect());
    }
    for Definition { name, .. } in &definitions {
        output::print_line(format!("projection {name}: sound, and its servers have addresses"))?;
    }
    Ok(())
}

fn show(args: &ProjectionFile) -> Result<(), Failure> {
    let definitions = read(args)?;
    if args.json {
        return output::print_json(&definitions.iter().map(detail).collect());
    }
    let texts: Vec<String> = definitions.iter().map(text).collect();
    output::print(texts.join("\n"))
}

/// What a script reads of a definition.
fn summary(definition: &Definition) -> Value {
    json!({
        "name": definition.name,
        "layout": definition.layout.to_string(),
        "fingerprint": format!("{:016x}", definition.fingerprint()),
        "servers": definition.servers,
    })
}

fn detail(definition: &Definition) -> Value {
    let mut value = summary(definition);
    value["path"] = json!(definition.path);
    value["width"] = json!(definition.width);
    value["stripe_bytes"] = json!(definition.stripe_bytes);
    value["data_hash"] = json!(definition.data_hash.to_string());
    value["meta_hash"] = json!(definition.meta_hash.to_string());
    value["spread_creates"] = json!(definition.spread_creates);
    value["atomic"] = json!(definition.atomic);
    value["canonical"] = json!(definition.canonical());
    value["shares"] = HomeShares::of(definition).json();
    value["failover"] = json!(definition.failover);
    if definition.failover {
        value["slices"] = SliceShares::of(definition).json();
    }
    value
}

fn text(definition: &Definition) -> String {
    let Definition { name, layout, servers, path, width, stripe_bytes, .. } = definition;
    let mut text = format!(
        "projection {name}, layout {layout}, definition {:016x}\n  directory {path} at {} servers\n",
        definition.fingerprint(),
        servers.len()
    );
    text += &match layout.is_striped() {
        true => format!(
            "  a file: blocks of {} KiB over {width} servers{}\n",
            stripe_bytes >> 10,
            if definition.atomic { ", which `atomic` puts at one" } else { "" }
        ),
        false if *layout == Layout::LoadBalance => {
            return text + "  read only, and each client uses one server\n";
        }
        false if !layout.is_shared() => "  the data of a file: at one server\n".to_owned(),
        false => "  a file: at one server\n".to_owned(),
    };
    text += &match (layout.is_shared(), definition.spread_creates) {
        (false, _) => format!(
            "  names, attributes and locks: at the home {}\n  hash: {} of data\n",
            servers[0], definition.data_hash
        ),
        (true, spread) => format!(
            "  names: {}\n  hashes: {} of files, {} of names\n",
            if spread {
                "each at a server of its own (spread_creates)"
            } else {
                "at the server of their directory"
            },
            definition.data_hash,
            definition.meta_hash
        ),
    };
    text += &HomeShares::of(definition).text();
    if let Some(cluster) = &definition.cluster {
        text += &format!(
            "  failover: etcd at {}; a server that it has not heard of for {} s is gone\n",
            cluster.etcd.join(" "),
            cluster.ttl.as_secs()
        );
        text += &SliceShares::of(definition).text();
    }
    text
}

//! Long runs of the simulator: `script/simulate [--seeds A..B] [--minutes N]`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use dray_rpc::server::Sabotage;
use dray_testkit::simulator;

const USAGE: &str = "simulate [--seeds A..B] [--minutes N] [--power] [--break WHAT]

--seeds A..B   runs these seeds; default 0..2000
--minutes N    runs seeds from A on until so many minutes are over
--power        the server's machine loses power
--break WHAT   leaves a protection of the server out: some seed must fail. reply-cache,
               intents, fence, reclaim; with --power redo, redo-order, redo-gate, redo-floor";

struct Wanted {
    seeds: std::ops::Range<u64>,
    time: Option<Duration>,
    sabotage: Option<Sabotage>,
    power: bool,
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Option<Wanted> {
    let mut wanted = Wanted { seeds: 0..2000, time: None, sabotage: None, power: false };
    while let Some(argument) = arguments.next() {
        if argument == "--power" {
            wanted.power = true;
            continue;
        }
        let value = arguments.next()?;
        match argument.as_str() {
            "--seeds" => {
                let (from, to) = value.split_once("..")?;
                wanted.seeds = from.parse().ok()?..to.parse().ok()?;
            }
            "--minutes" => {
                wanted.time = Some(Duration::from_secs(60 * value.parse::<u64>().ok()?));
                wanted.seeds.end = u64::MAX;
            }
            "--break" => {
                wanted.sabotage = Some(match value.as_str() {
                    "reply-cache" => Sabotage::ReplyCache,
                    "intents" => Sabotage::Intents,
                    "fence" => Sabotage::Fence,
                    "reclaim" => Sabotage::Reclaim,
                    "turns" => Sabotage::Turns,
                    "custody" => Sabotage::Custody,
                    "redo" => Sabotage::Redo,
                    "redo-order" => Sabotage::RedoOrder,
                    "redo-gate" => Sabotage::RedoGate,
                    "redo-floor" => Sabotage::RedoFloor,
                    _ => return None,
                });
            }
            _ => return None,
        }
    }
    Some(wanted)
}

fn main() -> ExitCode {
    let Some(wanted) = parse(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let begin = Instant::now();
    let (mut runs, mut deaths, mut breaks, mut failures) = (0u64, 0, 0, 0u64);
    for seed in wanted.seeds.clone() {
        if wanted.time.is_some_and(|time| begin.elapsed() >= time) {
            break;
        }
        let report = std::panic::catch_unwind(|| match wanted.power {
            true => simulator::run_power_losses(seed, wanted.sabotage),
            false => simulator::run(seed, wanted.sabotage),
        });
        runs += 1;
        match report {
            Ok(Ok(report)) => {
                deaths += report.deaths;
                breaks += report.breaks;
            }
            failed => {
                failures += 1;
                let why = match failed {
                    Ok(Err(failure)) => failure.to_string(),
                    _ => format!("seed {seed}: it panicked"),
                };
                let again = if wanted.power { "--power " } else { "" };
                println!("{why}\n  again: script/simulate {again}--seeds {seed}..{}", seed + 1);
            }
        }
        if runs.is_multiple_of(500) {
            eprintln!("{runs} runs, {failures} failed, {} s", begin.elapsed().as_secs());
        }
    }
    println!(
        "{runs} runs in {} s: {deaths} deaths of the server, {breaks} broken connections, \
         {failures} failed",
        begin.elapsed().as_secs()
    );
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

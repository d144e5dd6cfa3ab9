//! `ibstat` and `ibv_devinfo`: an adapter, its fields indented below it, its ports below those.

use std::collections::BTreeMap;

use infercluster_spec::BytesPerSec;
use infercluster_spec::cluster::LinkKind;

use super::error::ImportError;
use super::facts::NicFacts;
use super::table::{Line, lines};
use super::text::Text;
use super::{Import, Kind};

/// Adapters of one host.
const ADAPTERS_LIMIT: usize = 256;
/// Fields that every adapter of the tool has, and the one that counts ports.
struct Form {
    kind: Kind,
    adapter: &'static [&'static str],
    ports: &'static str,
    port: &'static [&'static str],
}

const IBSTAT: Form = Form {
    kind: Kind::Ibstat,
    adapter: &["CA type"],
    ports: "Number of ports",
    port: &["State", "Physical state", "Rate", "Port GUID"],
};

const IBV_DEVINFO: Form = Form {
    kind: Kind::IbvDevinfo,
    adapter: &["transport", "fw_ver", "node_guid"],
    ports: "phys_port_cnt",
    port: &["state", "max_mtu", "active_mtu", "port_lid"],
};

/// Keys and values with their lines; values of unknown width are cut at the limit of a message.
type Fields = BTreeMap<String, (String, usize)>;

#[derive(Default)]
struct Adapter {
    line: usize,
    name: String,
    fields: Fields,
    ports: Vec<(usize, Fields)>,
    last_line: usize,
    /// Whether its name is whole.
    is_named: bool,
}

/// `ibstat`.
pub(super) fn ibstat(text: &Text) -> Result<Option<Import>, ImportError> {
    read(text, &IBSTAT, |line| {
        let name = line.text.trim().strip_prefix("CA '")?;
        Some((name.trim_end_matches('\'').to_owned(), name.ends_with('\'')))
    })
}

/// `ibv_devinfo`, `-v` too.
pub(super) fn ibv_devinfo(text: &Text) -> Result<Option<Import>, ImportError> {
    read(text, &IBV_DEVINFO, |line| {
        let name = line.text.trim().strip_prefix("hca_id:")?.trim();
        (!name.is_empty()).then(|| (name.to_owned(), line.is_ended))
    })
}

fn read(
    text: &Text,
    form: &Form,
    heading: impl Fn(&Line) -> Option<(String, bool)>,
) -> Result<Option<Import>, ImportError> {
    let mut import = Import::new(form.kind);
    let mut adapters: Vec<Adapter> = Vec::new();
    for line in lines(text.body()) {
        if let Some((name, is_named)) = heading(&line) {
            if adapters.len() == ADAPTERS_LIMIT {
                return Err(text.too_many(line.number, "adapters in one host", ADAPTERS_LIMIT as u64));
            }
            adapters.push(Adapter {
                line: line.number,
                name,
                last_line: line.number,
                is_named,
                ..Adapter::default()
            });
        } else if let Some(adapter) = adapters.last_mut() {
            if line.pair().is_none() && !line.is_ended {
                import.lost(line.number, format!("the text ends within `{}`", line.first()));
            }
            field(adapter, &line);
        }
    }
    if adapters.is_empty() {
        return Ok(None);
    }
    repeated(&mut adapters, &mut import);
    import.nics = Some(adapters.len() as u64);
    for adapter in &adapters {
        check(adapter, &adapters, form, &mut import);
        import.facts.host.nics.push(facts(adapter));
    }
    Ok(Some(import))
}

fn field(adapter: &mut Adapter, line: &Line) {
    let Some((key, value)) = line.pair() else {
        return;
    };
    // `Port 1:` of one tool, `port: 1` of the other.
    let is_port = key
        .strip_prefix("Port ")
        .is_some_and(|number| number.parse::<u32>().is_ok())
        && value.is_empty()
        || key == "port" && value.parse::<u32>().is_ok();
    adapter.last_line = line.number;
    if is_port {
        adapter.ports.push((line.number, Fields::new()));
        return;
    }
    // A value that the text ends in, or that is missing, is none.
    if value.is_empty() || (!line.is_ended && value.parse::<f64>().is_ok()) {
        return;
    }
    let fields = match adapter.ports.last_mut() {
        Some((_, fields)) => fields,
        None => &mut adapter.fields,
    };
    let value: String = value.chars().take(64).collect();
    fields.entry(key.to_owned()).or_insert((value, line.number));
}

/// One adapter listed twice is one; what differs is a problem.
fn repeated(adapters: &mut Vec<Adapter>, import: &mut Import) {
    let mut first_of: BTreeMap<String, usize> = BTreeMap::new();
    adapters.retain(|adapter| match first_of.get(&adapter.name) {
        None => {
            first_of.insert(adapter.name.clone(), adapter.line);
            true
        }
        Some(first) => {
            import.problem(
                adapter.line,
                format!("{} stands in line {first} too", adapter.name),
            );
            false
        }
    });
}

/// Every adapter says how many ports it has; a port has the fields that any other port has.
fn check(adapter: &Adapter, all: &[Adapter], form: &Form, import: &mut Import) {
    let name = &adapter.name;
    if !adapter.is_named {
        import.lost(adapter.line, format!("the name {name} is cut"));
    }
    for key in form.adapter {
        if !adapter.fields.contains_key(*key) {
            import.lost(adapter.last_line, format!("{name} has no field {key}"));
        }
    }
    let announced = adapter.fields.get(form.ports);
    match announced.and_then(|(count, line)| Some((count.parse::<usize>().ok()?, line))) {
        Some((count, line)) if count > adapter.ports.len() => {
            let what = format!("{name} has {count} ports, {} follow", adapter.ports.len());
            import.lost(*line, what);
        }
        Some((count, line)) if count < adapter.ports.len() => {
            let what = format!("{name} has {count} ports, but {} follow", adapter.ports.len());
            import.problem(*line, what);
        }
        Some(_) => {}
        None => import.lost(
            adapter.last_line,
            format!("{name} does not say how many ports it has"),
        ),
    }
    let others = all
        .iter()
        .flat_map(|adapter| &adapter.ports)
        .map(|(_, fields)| fields);
    let usual: Vec<&str> = ["Link layer", "link_layer", "Base lid", "SM lid"]
        .into_iter()
        .filter(|key| others.clone().any(|fields| fields.contains_key(*key)))
        .collect();
    for (line, fields) in &adapter.ports {
        let missing: Vec<&str> = form
            .port
            .iter()
            .copied()
            .chain(usual.iter().copied())
            .filter(|key| !fields.contains_key(*key))
            .collect();
        if !missing.is_empty() {
            let last = fields.values().map(|(_, line)| *line).max().unwrap_or(*line);
            let what = format!("a port of {name} has no {}", missing.join(", "));
            import.lost(last, what);
        }
    }
}

/// The fastest active port stands for the adapter: its ports lead into one slot.
fn facts(adapter: &Adapter) -> NicFacts {
    let mut nic = NicFacts {
        line: adapter.line,
        name: adapter.name.clone(),
        is_down: !adapter.ports.is_empty(),
        ..NicFacts::default()
    };
    for (_, fields) in &adapter.ports {
        let value = |keys: [&str; 2]| {
            keys.iter()
                .find_map(|key| fields.get(*key))
                .map(|(value, _)| value.as_str())
        };
        let state = value(["State", "state"]).unwrap_or_default().to_lowercase();
        if !state.contains("active") {
            nic.is_down &= !state.is_empty();
            continue;
        }
        nic.is_down = false;
        // The transport says InfiniBand for Ethernet too; the link layer tells.
        nic.network = match value(["Link layer", "link_layer"]).unwrap_or_default() {
            "InfiniBand" => Some(LinkKind::Infiniband),
            "Ethernet" => Some(LinkKind::Ethernet),
            _ => nic.network,
        };
        let own = value(["Rate", "Rate"]).and_then(|rate| rate.split_whitespace().next()?.parse().ok());
        let rate = own
            .or_else(|| lanes(fields))
            .and_then(|rate: f64| BytesPerSec::new(rate * 1e9 / 8.0));
        if let Some(rate) =
            rate.filter(|rate| nic.rate.is_none_or(|own| own.per_second() < rate.per_second()))
        {
            nic.rate = Some(rate);
        }
    }
    nic
}

/// `active_width: 4X (2)` times `active_speed: 25.0 Gbps (32)`, in Gbit/s.
fn lanes(fields: &Fields) -> Option<f64> {
    let first = |key: &str| fields.get(key)?.0.split_whitespace().next();
    let lanes: f64 = first("active_width")?.trim_end_matches(['X', 'x']).parse().ok()?;
    let speed: f64 = first("active_speed")?.parse().ok()?;
    Some(lanes * speed)
}
